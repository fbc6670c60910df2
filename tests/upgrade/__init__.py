"""An upgrade of a running system, from the last release to this tree and back."""
