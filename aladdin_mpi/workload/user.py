"""Callables that the user names as ``package.module:callable``: their own models and data sets."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable

from aladdin_mpi.errors import ConfigError

__all__ = ["call_offering", "is_callable_path", "load_callable"]


def is_callable_path(name: str) -> bool:
    """Tell whether ``name`` has the form ``package.module:callable``."""
    module, separator, attribute = name.partition(":")
    return bool(separator) and all(
        part.isidentifier() for part in [*module.split("."), *attribute.split(".")]
    )


def load_callable(path: str, option: str) -> Callable[..., object]:
    """Import what ``package.module:callable`` names.

    Parameters
    ----------
    path : str
        Module and callable; the callable may be dotted (``my.models:Net.small``).
    option : str
        The option that ``path`` is the value of, for the messages.

    Returns
    -------
    callable

    Raises
    ------
    ConfigError
        The form is wrong, the module or something it imports is not found, the attribute is missing
        or cannot be called.  Any other exception of the user's module passes through.
    """
    if not is_callable_path(path):
        raise ConfigError(
            f"{option} {path}: not of the form package.module:callable; give for example "
            "my_package.my_module:make"
        )
    module_name, _, attribute = path.partition(":")
    try:
        found: object = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        if module_name == missing or module_name.startswith(missing + "."):
            raise ConfigError(
                f"{option} {path}: there is no module {missing}; install it, or put its folder on "
                "PYTHONPATH"
            ) from error
        raise ConfigError(
            f"{option} {path}: module {module_name} imports {missing}, which is not installed; "
            "install it"
        ) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ConfigError(
                f"{option} {path}: {_name_of(found)} has no {part}; check the name after the colon"
            )
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(
            f"{option} {path}: is of type {type(found).__name__}, which cannot be called; name a "
            "function or a class"
        )
    return found


def call_offering(function: Callable[..., object], where: str, /, **offered: object) -> object:
    """Call a user's function with those of the offered keywords that its signature accepts.

    Parameters
    ----------
    function : callable
    where : str
        Option and value that named it, for the message.
    **offered
        Keyword arguments; those it does not know are left out.

    Returns
    -------
    object
        What the function returned; its exceptions pass through.

    Raises
    ------
    ConfigError
        It needs an argument that is not offered.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # built in C: nothing is known about it
        return function()
    parameters = signature.parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        known = {parameter.name for parameter in parameters if parameter.kind in by_keyword}
        offered = {name: value for name, value in offered.items() if name in known}
    try:
        signature.bind(**offered)
    except TypeError as error:
        raise ConfigError(
            f"{where}: cannot be called ({error}); give its other arguments defaults"
        ) from error
    return function(**offered)


def _name_of(found: object) -> str:
    return str(getattr(found, "__name__", type(found).__name__))
