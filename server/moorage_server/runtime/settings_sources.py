"""Reads Settings from a file, the environment and flags, and says what is wrong with them in the words of their keys.

Every source becomes a layer: the paths it sets, their values, and the words for where each came from.
"""

from __future__ import annotations

import difflib
import re
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from moorage_server.core import config as core
from moorage_server.errors import shorten
from moorage_server.runtime.addresses import host_and_port
from moorage_server.runtime.redaction import mask_url, redact_text
from moorage_server.runtime.section import Section
from moorage_server.runtime.settings import Settings

KeyPath = tuple[Any, ...]

CONFIG_VARIABLE = "MOORAGE_CONFIG"
POOLS_VARIABLE = "MOORAGE_POOLS"
_ENV_PREFIX = "MOORAGE_"
#: What the client and the command line read.
CLIENT_VARIABLES = frozenset(
    _ENV_PREFIX + name
    for name in ("SERVER", "POOL", "TOKEN", "TOKEN_FILE", "PLAINTEXT_TOKEN", "TLS", "CA", "CERT", "KEY")
)
#: What Kubernetes sets for a Service called moorage.
_LINK = re.compile(r"_SERVICE_(HOST|PORT)|_PORT_\d+_(TCP|UDP)|_PORT=(tcp|udp)://")
_URL: KeyPath = ("redis", "url")
_EMBEDDED: KeyPath = ("redis", "embedded")
#: What else says where a store is.
_STORE: tuple[KeyPath, ...] = (_URL, ("redis", "sentinels"), ("redis", "master_name"), ("redis", "cluster"))
_TRUE = {"true", "t", "yes", "y", "on", "1"}

#: Ways to listen beyond loopback.
_EXPOSED = (
    "is beyond loopback, where anybody could call: give auth.tokens_file (bearer tokens), or tls.client_ca_file with"
    " tls.cert_file and tls.key_file (client certificates), or say insecure_listen: true (--insecure-listen) where the"
    " network keeps strangers out"
)

#: Keyword of a flag -> key it sets.
FLAGS: dict[str, KeyPath] = {
    "listen": ("listen",),
    "processes": ("processes",),
    "redis_url": _URL,
    "embedded": _EMBEDDED,
    "metrics_listen": ("metrics", "listen"),
    "log_format": ("log", "format"),
    "log_level": ("log", "level"),
    "reflection": ("reflection",),
    "insecure_listen": ("insecure_listen",),
}


class SettingsError(Exception):
    """The configuration is unusable. ``problems``: one line each with the key, the limit, the value and its source."""

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class _Given(NamedTuple):
    value: object
    source: str


_Layer = dict[KeyPath, _Given]


def load_settings(config_file: str | None, overrides: Mapping[str, object], environ: Mapping[str, str]) -> Settings:
    """Settings from the file (or the one that MOORAGE_CONFIG names), the environment, and flags, the last one winning.

    ``overrides`` has the keys of FLAGS; None means not given, and so does a false ``embedded``, which is a bare flag.
    Raises SettingsError with every problem found.
    """
    config_file = config_file or environ.get(CONFIG_VARIABLE)
    file_layer = _flat(read_file(config_file), config_file) if config_file else {}
    given: _Layer = {}
    for layer in (file_layer, _from_environment(environ), _from_flags(overrides)):
        _lay(given, layer)
    try:
        settings = Settings.model_validate(_nested(given))
    except ValidationError as error:
        raise SettingsError(*(_told(details, given) for details in error.errors())) from None
    problems = [
        _line(("pools", name, *problem.key.split(".")), f"must be {problem.limit}", problem.value, given)
        for name, pool in settings.pool_configs().items()
        for problem in core.check(pool)
    ]
    if settings.exposed:
        problems.append(_line(("listen",), _EXPOSED, settings.listen, given))
    problems += [_line(path, complaint, value, given) for path, complaint, value in _unshareable(settings)]
    if problems:
        raise SettingsError(*problems)
    return settings


def _unshareable(settings: Settings) -> Iterator[tuple[KeyPath, str, object]]:
    """What keeps several processes from being one server: key, complaint, value."""
    if settings.processes == 1:
        return
    if settings.embedded:
        complaint = "must be 1 with the embedded ledger, which lives in one process: give redis.url (--redis-url)"
        yield ("processes",), complaint, settings.processes
    if not hasattr(socket, "SO_REUSEPORT"):
        yield ("processes",), "must be 1: this platform can not share a port (no SO_REUSEPORT)", settings.processes
    metrics = settings.metrics.listen
    if metrics is not None and host_and_port(metrics)[1] + settings.processes - 1 > 65_535:
        complaint = f"needs a port for each of {settings.processes} processes, up to 65535"
        yield ("metrics", "listen"), complaint, metrics


def read_file(name: str) -> dict[str, Any]:
    """The mapping in a YAML file. Raises SettingsError where there is none."""
    return _mapping(read_yaml(name), name)


def read_yaml(name: str) -> Any:
    """What a YAML file holds. Raises SettingsError where it can not be read."""
    try:
        content = Path(name).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        # The error itself would quote the file.
        raise SettingsError(f"{name}: can not be read: not UTF-8") from None
    except OSError as error:
        raise SettingsError(f"{name}: can not be read: {error.strerror}") from None
    return _parse(content, name)


class _UniqueKeyLoader(yaml.SafeLoader):
    """Refuses a key given twice, which YAML forbids and PyYAML settles silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen and isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} is given twice", key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


def _parse(content: str, name: str) -> Any:
    try:
        return yaml.load(content, Loader=_UniqueKeyLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        raise SettingsError(f"{name}: not YAML: {error.problem}{where}") from None
    except yaml.YAMLError:
        raise SettingsError(f"{name}: not YAML: holds a character that YAML does not allow") from None


def _mapping(data: Any, name: str) -> dict[str, Any]:
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise SettingsError(f"{name}: must hold keys and values, got a {type(data).__name__}")
    return data


def environment_variables() -> dict[str, KeyPath]:
    """Name of each variable and the key it sets; pools are given whole, in MOORAGE_POOLS, certificates in a file."""
    return {_ENV_PREFIX + "_".join(path).upper(): path for path in _leaves(Settings, ())}


def unknown_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables of ours that nobody reads, each with the name that may have been meant; empty where none is close."""
    known = {*environment_variables(), POOLS_VARIABLE, CONFIG_VARIABLE, *CLIENT_VARIABLES}
    strange = [
        name
        for name, value in environ.items()
        if name.startswith(_ENV_PREFIX) and name not in known and not _LINK.search(f"{name}={value}")
    ]
    # Of whole names the common prefix alone would make any two alike.
    ends = sorted(name.removeprefix(_ENV_PREFIX) for name in known)
    close = {name: difflib.get_close_matches(name.removeprefix(_ENV_PREFIX), ends, n=1) for name in sorted(strange)}
    return {name: _ENV_PREFIX + found[0] if found else "" for name, found in close.items()}


def _leaves(section: type[BaseModel], above: KeyPath) -> Iterator[KeyPath]:
    for name, field in section.model_fields.items():
        if (inner := _section_in(field.annotation)) is None:
            yield (*above, name)
        elif get_origin(field.annotation) is not dict:
            yield from _leaves(inner, (*above, name))


def _section_in(annotation: Any) -> type[Section] | None:
    """The section that a field holds, itself, unless absent, or as the values of a mapping."""
    inside = get_args(annotation) or (annotation,)
    return next((one for one in inside if isinstance(one, type) and issubclass(one, Section)), None)


def _flat(data: Mapping[Any, Any], source: str, above: KeyPath = ()) -> _Layer:
    layer: _Layer = {}
    for key, value in data.items():
        if isinstance(value, Mapping) and value:
            layer |= _flat(value, source, (*above, key))
        else:
            layer[(*above, key)] = _Given(value, source)
    return layer


def _from_environment(environ: Mapping[str, str]) -> _Layer:
    layer = {
        path: _Given(value, variable)
        for variable, path in environment_variables().items()
        if (value := environ.get(variable))
    }
    if pools := environ.get(POOLS_VARIABLE):
        layer |= _flat(_mapping(_parse(pools, POOLS_VARIABLE), POOLS_VARIABLE), POOLS_VARIABLE, ("pools",))
    return layer


def _from_flags(overrides: Mapping[str, object]) -> _Layer:
    return {
        FLAGS[name]: _Given(value, "--" + name.replace("_", "-"))
        for name, value in overrides.items()
        if value is not None and not (name == "embedded" and not value)
    }


def _lay(given: _Layer, layer: _Layer) -> None:
    """Puts a layer on top. Whoever names a store overrules the other kind of store named below."""
    url, sentinels, embedded = (layer.get(path, _Given(None, "")).value for path in (*_STORE[:2], _EMBEDDED))
    named = url is not None or sentinels is not None
    if named and embedded is None:
        given.pop(_EMBEDDED, None)
    if str(embedded).lower() in _TRUE and not named:
        for path in _STORE:
            given.pop(path, None)
    given |= layer


def _nested(given: _Layer) -> dict[str, Any]:
    """The layers' paths as nested mappings. Shorter paths come first, so that a null section gives way to its keys."""
    result: dict[str, Any] = {}
    for path in sorted(given, key=len):
        section = result
        for part in path[:-1]:
            if section.get(part) is None:
                section[part] = {}
            section = section[part]
            if not isinstance(section, dict):
                break
        else:
            section[path[-1]] = given[path].value
    return result


def _told(details: ErrorDetails, given: _Layer) -> str:
    path = details["loc"]
    if details["type"] == "extra_forbidden":
        return _line(path, "unknown key" + _suggestion(path), None, given)
    if details["type"] == "value_error":
        return _line(path, str(details["ctx"]["error"]), details["input"], given)
    return _line(path, re.sub(r"^\w+ should ", "must ", details["msg"]), details["input"], given)


def _suggestion(path: KeyPath) -> str:
    section: type[Section] | None = Settings
    steps = iter(path[:-1])
    for step in steps:
        annotation = section.model_fields[step].annotation if section else None
        section = _section_in(annotation)
        if get_origin(annotation) is dict:
            next(steps)
    known = list(section.model_fields) if section else []
    close = difflib.get_close_matches(str(path[-1]), known, n=1)
    return f"; did you mean {close[0]}?" if close else f"; known here: {', '.join(known)}"


def _line(path: KeyPath, complaint: str, value: object, given: _Layer) -> str:
    text = f"{'.'.join(str(part) for part in path if part != '[key]')}: {complaint}"
    if isinstance(value, str | int | float):
        shown = mask_url(value) if path[:1] == ("redis",) and isinstance(value, str) else redact_text(str(value))
        text += f", got {shorten(shown)!r}"
    source = _source(path, given)
    return f"{text} ({source})" if source else text


def _source(path: KeyPath, given: _Layer) -> str:
    """Where the value at ``path`` came from: what set it or something in it, else what set something near it."""
    for length in range(len(path), 0, -1):
        near = path[:length]
        if near in given:
            return given[near].source
        if inside := next((one.source for key, one in given.items() if key[:length] == near), None):
            return inside
    return ""
