"""txoutbox, measured as its documentation recommends."""
