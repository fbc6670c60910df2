"""The data of a project that `pillarbox dev` keeps between two runs."""

import fcntl
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final
from urllib.parse import quote, urlsplit

from pillarbox.outbox.errors import ConfigError
from pillarbox.outbox.testing.lifetime import free_port, unprivileged_user
from pillarbox.outbox.testing.wheel import everybody_can_enter

_FOLDER: Final = ".pillarbox"
_FOR_ROOT: Final = Path("/var/lib/pillarbox")


def _mark() -> str:
    """Return a secret of this user, which nobody who ships a project knows."""
    home = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    path = Path(home).expanduser() / "pillarbox" / "dev"
    if not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.touch(mode=0o600)
        path.write_text(secrets.token_hex(16))
    return path.read_text()


class Project:
    """A folder with the server's data, its URL, and the page's token.

    It is `.pillarbox` in the project. PostgreSQL refuses to run as root; if its user
    can't enter the project, the folder is in /var/lib/pillarbox, under the project's
    path.

    Args:
        root: the project's directory.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = root / _FOLDER
        if unprivileged_user() is not None and not everybody_can_enter(root):
            self.folder = _FOR_ROOT / quote(str(root), safe="")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Create the folder, and keep a second `pillarbox dev` out of it.

        Raises:
            ConfigError: one runs already.
        """
        kept = self.folder.exists()
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / ".gitignore").write_text("*\n")
        with (self.folder / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(
                    f"another pillarbox dev runs in {self.root}: stop that one first"
                ) from None
            mark = self.folder / "made-here"
            if kept and not (mark.exists() and mark.read_text() == _mark()):
                raise ConfigError(
                    f"{self.folder} was not made by pillarbox dev of this user: it came"
                    " with the project or was copied, and could run any program; look "
                    "at it, and remove it"
                )
            mark.write_text(_mark())
            yield

    def erase(self) -> None:
        """Remove what was kept, other than the lock."""
        for entry in self.folder.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry)
            elif entry.name not in {"lock", "made-here"}:
                entry.unlink()

    @property
    def data(self) -> Path:
        """The data directory of a server that runs on this machine itself."""
        return self.folder / "data"

    @property
    def url(self) -> str:
        """The database's URL, in SQLAlchemy's form, until the project is erased."""
        return self.keep(
            "url",
            lambda: (
                f"postgresql+psycopg://postgres:{secrets.token_hex(16)}"
                f"@127.0.0.1:{free_port()}/pillarbox"
            ),
        )

    @property
    def port(self) -> int:
        """The server's port."""
        port = urlsplit(self.url).port
        assert port is not None
        return port

    @property
    def password(self) -> str:
        """The password of the user `postgres`."""
        return urlsplit(self.url).password or ""

    @property
    def tokens(self) -> Path:
        """The file with the page's viewers: one, with all rights."""
        self.keep("tokens", lambda: f"you {secrets.token_hex(16)} act pause payloads")
        return self.folder / "tokens"

    @property
    def token(self) -> str:
        """The token with which that viewer logs in."""
        return self.tokens.read_text().split()[1]

    def keep(self, name: str, make: Callable[[], str]) -> str:
        """Return what a file holds; if there is none, write what `make` returns."""
        path = self.folder / name
        if not path.exists():
            text = make()
            path.touch(mode=0o600)
            path.write_text(f"{text}\n")
        return path.read_text().strip()
