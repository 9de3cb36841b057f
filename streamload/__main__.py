"""`python -m streamload` is the command `streamload`, for where the commands of an environment are not on the path."""

from __future__ import annotations

from streamload_tools.main import main

if __name__ == "__main__":
    main()
