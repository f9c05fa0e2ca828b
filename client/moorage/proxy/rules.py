"""Which class a request belongs to, and how sessions of a class end: the small YAML of the proxy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

DEFAULT_IDLE_S = 300.0


@dataclass(frozen=True, slots=True)
class ClassPolicy:
    """How sessions of one class are treated.

    Attributes:
        idle_s: seconds without a request after which a session is over.
        single_turn: every request is a session of its own, released with its answer.
        max_context_tokens: largest context that such a session may reach; None where nobody said.
    """

    idle_s: float = DEFAULT_IDLE_S
    single_turn: bool = False
    max_context_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Rule:
    """Requests that match all that is given are of class `workload_class`. Patterns as in a shell: `*`, `?`, `[ab]`."""

    workload_class: str
    path: str | None = None
    model: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def matches(self, path: str, model: str, headers: Mapping[str, str]) -> bool:
        """Whether a request does."""
        return (
            (self.path is None or fnmatchcase(path, self.path))
            and (self.model is None or fnmatchcase(model, self.model))
            and all(name in headers and fnmatchcase(headers[name], like) for name, like in self.headers.items())
        )


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules in order, and the policy of each class.

    Example:
        >>> rules = Rules.parse({"rules": [{"model": "judge-*", "class": "judge"}], "default_class": "rlvr"})
        >>> rules.class_of("/v1/completions", "judge-7b", {}), rules.class_of("/v1/completions", "main", {})
        ('judge', 'rlvr')
    """

    rules: tuple[Rule, ...] = ()
    default_class: str = ""
    classes: Mapping[str, ClassPolicy] = field(default_factory=dict)
    default_policy: ClassPolicy = field(default_factory=ClassPolicy)

    @classmethod
    def parse(
        cls,
        content: Mapping[str, Any],
        *,
        default_class: str | None = None,
        idle_s: float = DEFAULT_IDLE_S,
        duration: Callable[[Any], float] = float,
    ) -> Rules:
        """From the keys `rules`, `classes` and `default_class`. ValueError names what is wrong.

        `default_class` goes over the content's; `idle_s` is for classes that name none; `duration` reads times.
        """
        if idle_s <= 0:
            raise ValueError(f"idle: must be above 0 seconds, not {idle_s:g}")
        entries = _list(content.get("rules"), "rules")
        named = _mapping(content.get("classes"), "classes")
        return cls(
            rules=tuple(_rule(entry, f"rules[{index}]") for index, entry in enumerate(entries)),
            default_class=_text(content.get("default_class", ""), "default_class")
            if default_class is None
            else default_class,
            classes={str(name): _policy(entry, f"classes.{name}", idle_s, duration) for name, entry in named.items()},
            default_policy=ClassPolicy(idle_s=idle_s),
        )

    def class_of(self, path: str, model: str, headers: Mapping[str, str]) -> str:
        """The class of a request that names none itself; empty means unlabelled."""
        return next(
            (rule.workload_class for rule in self.rules if rule.matches(path, model, headers)), self.default_class
        )

    def policy_of(self, workload_class: str) -> ClassPolicy:
        """How sessions of the class are treated."""
        return self.classes.get(workload_class, self.default_policy)


def _rule(entry: Any, where: str) -> Rule:
    fields = _known(entry, where, {"class", "path", "model", "header"})
    if "class" not in fields:
        raise ValueError(f"{where}: class is missing")
    headers = _mapping(fields.get("header"), f"{where}.header")
    return Rule(
        workload_class=_text(fields["class"], f"{where}.class"),
        path=None if "path" not in fields else _text(fields["path"], f"{where}.path"),
        model=None if "model" not in fields else _text(fields["model"], f"{where}.model"),
        headers={str(name): _text(value, f"{where}.header.{name}") for name, value in headers.items()},
    )


def _policy(entry: Any, where: str, idle_s: float, duration: Callable[[Any], float]) -> ClassPolicy:
    fields = _known(entry, where, {"idle", "single_turn", "max_context_tokens"})
    try:
        idle = duration(fields.get("idle", idle_s))
    except Exception as error:
        raise ValueError(f"{where}.idle: {fields['idle']!r} is no duration such as 30, 30s or 5m") from error
    single_turn = fields.get("single_turn", False)
    if not isinstance(single_turn, bool):
        raise ValueError(f"{where}.single_turn: {single_turn!r} is neither true nor false")
    tokens = fields.get("max_context_tokens")
    if tokens is not None and (isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1):
        raise ValueError(f"{where}.max_context_tokens: {tokens!r} is no number of tokens, at least 1")
    if idle <= 0:
        raise ValueError(f"{where}.idle: must be above 0 seconds, not {idle:g}")
    return ClassPolicy(idle, single_turn, tokens)


def _known(entry: Any, where: str, names: set[str]) -> Mapping[str, Any]:
    fields = _mapping(entry, where)
    if unknown := sorted(set(map(str, fields)) - names):
        raise ValueError(f"{where}: unknown key {unknown[0]!r}, not one of {sorted(names)}")
    return fields


def _mapping(value: Any, where: str) -> Mapping[Any, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}: must be a mapping, not {value!r}")
    return value


def _list(value: Any, where: str) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise ValueError(f"{where}: must be a list, not {value!r}")
    return value


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{where}: must be a string, not {value!r}")
    return value
