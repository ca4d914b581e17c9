"""Tables and pages from records alone: no training, no GPU."""
