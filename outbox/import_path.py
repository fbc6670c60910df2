"""Import the object that `module:name` names, and report where a failure happened."""

import importlib
import os
import sysconfig
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from outbox.errors import ConfigError, one_line

_LIBRARIES: Final = tuple(
    f"{path}{os.sep}"
    for path in {
        sysconfig.get_path(name)
        for name in ("stdlib", "platstdlib", "purelib", "platlib")
    }
)


def import_object(what: str, path: str) -> Any:
    """Import the object that a path names.

    Args:
        what: what the object should be, for the error message: `consumer`, `codec`.

    Raises:
        ConfigError: the path isn't `module:name`, there is no such module or name, or
            the module can't be imported; the message names the file and the line.
    """
    module_name, separator, name = path.partition(":")
    if not separator or not module_name or not name:
        raise ConfigError(f"{what} {path!r}: write module:name, e.g. app:{what}")
    found: Any = _import(what, path, module_name)
    reached = module_name
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError as error:
            if isinstance(found, ModuleType):
                reached = f"{reached} ({found.__file__ or 'a package without a file'})"
            raise ConfigError(
                f"{what} {path!r}: {part!r} is not in {reached}"
            ) from error
        reached = f"{reached}.{part}"
    return found


def where(error: BaseException) -> str:
    """Return the file and line that caused an error, in the user's code if possible."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{error.filename}, line {error.lineno}"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<frozen ") and frame.filename != __file__
    ]
    users = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)]
    if not frames:
        return "none of its lines has run"
    frame = (users or frames)[-1]
    return f"{frame.filename}, line {frame.lineno}"


def _import(what: str, path: str, module_name: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise _broken(what, path, module_name, error) from error
        raise ConfigError(
            f"{what} {path!r}: No module named {error.name!r} in {Path.cwd()} or on "
            "Python's path; start it in the directory of the module, or set PYTHONPATH"
        ) from error
    except Exception as error:
        raise _broken(what, path, module_name, error) from error


def _broken(what: str, path: str, module_name: str, error: Exception) -> ConfigError:
    reason = one_line(error, with_text=True)
    return ConfigError(
        f"{what} {path!r}: can't import {module_name!r}: {reason} ({where(error)})"
    )
