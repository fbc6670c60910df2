"""The checks of `pillarbox doctor`, by subject; `check.py` has their interface."""
