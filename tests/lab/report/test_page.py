"""The template: what a long page has, and what becomes of text."""

import re

from smoothout.lab.report.page import MOST_WITHOUT_CONTENTS, Page, Section


def _page(sections):
    return Page("title", "lead", tuple(Section(f"About {i} & more") for i in range(sections))).to_html()


def test_a_page_of_many_sections_has_a_list_of_them_that_leads_there():
    assert "<nav" not in _page(MOST_WITHOUT_CONTENTS)
    long = _page(MOST_WITHOUT_CONTENTS + 1)
    links = re.findall(r'<a href="#([^"]+)">([^<]+)</a>', long)
    assert [text for _, text in links] == [f"About {i} &amp; more" for i in range(MOST_WITHOUT_CONTENTS + 1)]
    for target, text in links:
        assert f'<section id="{target}">\n<h2>{text}</h2>' in long


def test_commands_in_a_paragraph_are_set_as_code_and_nothing_else_is_let_through():
    page = Page("title", "lead", (Section("s", ("run `smoothout <x>` or <b>not</b>",)),)).to_html()
    assert "<p>run <code>smoothout &lt;x&gt;</code> or &lt;b&gt;not&lt;/b&gt;</p>" in page
