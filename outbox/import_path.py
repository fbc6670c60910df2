"""Import the object that `module:name` names, and report where a failure happened."""

import importlib
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from pillarbox.outbox.errors import ConfigError, one_line, own_frame


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
    frame, line = own_frame([*traceback.walk_tb(error.__traceback__)][::-1])
    file = frame.f_code.co_filename
    if file == __file__ or file.startswith("<frozen "):
        return "before its first line ran"
    return f"{file}, line {line}"


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
