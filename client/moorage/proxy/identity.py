"""Who asks: session, class and group of a request, from its headers, its body, or the configured rules."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moorage.proxy.rules import ClassPolicy, Rules

#: Headers in which clients name a session, in order: vLLM, vLLM Router, prime-rl (X-Session-ID); the SGLang gateway,
#: slime, miles (X-SMG-Routing-Key); OpenCode, Claude Code, Codex (old and new spelling), LiteLLM. What names a single
#: request, or may (X-Request-ID, X-Correlation-ID), is not among them: a session of each would stay until it is idle.
SESSION_HEADERS = (
    "X-Session-ID",
    "X-SMG-Routing-Key",
    "X-Session-Affinity",
    "X-OpenCode-Session",
    "X-Claude-Code-Session-Id",
    "session-id",
    "session_id",
    "X-LiteLLM-Session-Id",
)

#: Fields of the body that do the same, as paths: vLLM, vLLM Router and SGLang, vLLM again, OpenAI's free metadata.
SESSION_FIELDS = ("session_id", "session_params.session_id", "vllm_xargs.session_id", "metadata.session_id")

MAX_ID_BYTES = 256
MAX_TOKENS = 2**40
MAX_VERSION = 2**63 - 1
_TRUE = frozenset({"1", "true", "yes", "on"})


class BadRequest(ValueError):
    """The request can not be served as it is; the message names field, value and limit."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """What a request says of its session.

    Attributes:
        session_id: as named by the client, or made for this request.
        named: the client named it, and may come back.
        workload_class: empty means unlabelled.
        policy: how sessions of the class end.
        ends: the session is over with this request.
        prompt_tokens: tokens of the whole prompt; None where only the engine can tell.
        max_context_tokens: largest context of the session; None where nobody said.
        policy_version: version of the weights that the session began with; None where nobody said.
    """

    session_id: str
    named: bool
    workload_class: str
    policy: ClassPolicy
    group_id: str | None = None
    group_size: int | None = None
    ends: bool = False
    prompt_tokens: int | None = None
    max_context_tokens: int | None = None
    policy_version: int | None = None


@dataclass(frozen=True, slots=True)
class Identifier:
    """Reads tickets. `headers` and `fields` are further places of a session's name, looked at before the usual ones.

    Example:
        >>> ticket = Identifier(Rules()).ticket("/v1/completions", {"X-Session-ID": "s-1"}, {"prompt": [1, 2]})
        >>> ticket.session_id, ticket.named, ticket.prompt_tokens
        ('s-1', True, 2)
    """

    rules: Rules
    headers: Sequence[str] = ()
    fields: Sequence[str] = ()

    def ticket(self, path: str, headers: Mapping[str, str], body: Mapping[str, Any]) -> Ticket:
        """The ticket of a request; header names are matched as `headers` matches them. Raises BadRequest."""
        session_id = self._session_id(headers, body)
        model = body.get("model")
        named_class = headers.get("X-Workload-Class") or _field(body, "metadata.workload_class", "class")
        workload_class = checked_id(named_class, "workload class") if named_class else None
        if workload_class is None:
            workload_class = self.rules.class_of(path, model if isinstance(model, str) else "", headers)
        policy = self.rules.policy_of(workload_class)
        group_id = headers.get("X-Group-ID") or _field(body, "metadata.group_id", "group")
        prompt_tokens = _header_tokens(headers, "X-Prompt-Tokens")
        if prompt_tokens is None:
            prompt_tokens = _prompt_tokens(body)
        ends = session_id is None or policy.single_turn
        return Ticket(
            session_id=session_id or f"http-{uuid.uuid4()}",
            named=session_id is not None,
            workload_class=workload_class,
            policy=policy,
            group_id=checked_id(group_id, "group") if group_id else None,
            group_size=_header_tokens(headers, "X-Group-Size", 2**32 - 1),
            ends=ends or _says_end(headers, body),
            prompt_tokens=prompt_tokens,
            max_context_tokens=_max_context(headers, body, policy, prompt_tokens if ends else None),
            policy_version=_header_tokens(headers, "X-Policy-Version", MAX_VERSION),
        )

    def _session_id(self, headers: Mapping[str, str], body: Mapping[str, Any]) -> str | None:
        for name in (*self.headers, *SESSION_HEADERS):
            if value := headers.get(name):
                return checked_id(value, f"session id in header {name}")
        for path in (*self.fields, *SESSION_FIELDS):
            if value := _field(body, path, "session id"):
                return checked_id(value, f"session id in {path}")
        return None


def checked_id(value: str, what: str) -> str:
    """`value` if it can be an id, and travel in a header; BadRequest otherwise."""
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise BadRequest(f"{what}: is not valid UTF-8") from None
    if not 1 <= size <= MAX_ID_BYTES:
        raise BadRequest(f"{what}: must have 1 to {MAX_ID_BYTES} bytes, not {size}")
    if any(ord(letter) < 32 or ord(letter) == 127 for letter in value):
        raise BadRequest(f"{what}: {value!r} has control characters")
    return value


def _field(body: Mapping[str, Any], path: str, what: str) -> str | None:
    """A string at a path such as metadata.session_id; None where there is none."""
    value: Any = body
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    if value is None or value == "":
        return None
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise BadRequest(f"{what} in {path}: must be a string, not {value!r:.80}")
    return value


def _says_end(headers: Mapping[str, str], body: Mapping[str, Any]) -> bool:
    """Whether the request is its session's last: by header, or in the body, as not all gateways pass headers on."""
    said: Any = headers.get("X-Session-End")
    metadata = body.get("metadata")
    if said is None and isinstance(metadata, Mapping):
        said = metadata.get("session_end")
    return str(said).strip().lower() in _TRUE


def _header_tokens(headers: Mapping[str, str], name: str, limit: int = MAX_TOKENS) -> int | None:
    text = headers.get(name)
    if text is None:
        return None
    # Of very long numbers Python reads none, and those that are told from their first digits may begin with zeros.
    digits = text.lstrip("0") or text[:1]
    if not (text.isascii() and text.isdigit()) or len(digits) > 20 or int(digits) > limit:
        raise BadRequest(f"header {name}: must be a whole number from 0 to {limit}, not {text[:80]!r}")
    return int(digits)


def _prompt_tokens(body: Mapping[str, Any]) -> int | None:
    """Known only of a prompt that is given as token ids."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
        return len(prompt)
    return None


def _max_context(
    headers: Mapping[str, str], body: Mapping[str, Any], policy: ClassPolicy, only_prompt: int | None
) -> int | None:
    """As declared, or as the class has it; of a session of one request, prompt plus what it may generate."""
    declared = _header_tokens(headers, "X-Max-Context-Tokens")
    if declared is not None or policy.max_context_tokens is not None:
        return policy.max_context_tokens if declared is None else declared
    limit = next((body[name] for name in ("max_completion_tokens", "max_tokens") if body.get(name) is not None), None)
    if only_prompt is None or isinstance(limit, bool) or not isinstance(limit, int) or limit < 0:
        return None
    return only_prompt + limit
