"""From the source to the handler and back: fetch, dispatch, settle."""
