"""The page: an ASGI application that shows what the tables contain, and repairs it.

`app` assembles it, `login` identifies viewers, and `database` manages its sessions.
Each of the other modules is one section of the page. Outside this folder, only the
command `pillarbox web` uses it.
"""

try:
    from pillarbox.outbox.web.app import web_app
    from pillarbox.outbox.web.login import Identify, TokenLogin, Viewer
    from pillarbox.outbox.web.settings import Settings
except ModuleNotFoundError as error:
    raise ImportError(
        f"the page needs {error.name}: pip install 'pillarbox[web]'"
    ) from error

__all__ = ["Identify", "Settings", "TokenLogin", "Viewer", "web_app"]
