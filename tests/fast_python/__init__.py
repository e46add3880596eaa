"""An interpreter for tests that has torch imported already."""
