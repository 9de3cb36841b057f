"""Start and feed worker processes, and detect ranks and processors."""
