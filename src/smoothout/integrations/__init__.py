"""SmoothOut inside other people's training loops. Each file imports its framework lazily."""
