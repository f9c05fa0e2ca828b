"""Words for class labels: declared, in force, and what behaviour says of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moorage.cli.cells import NONE, cell, enum_name

if TYPE_CHECKING:
    from moorage.v1.inspector_pb2 import GetPoolResponse, Session


def behaviour(session: Session) -> str:
    """The class that behaviour points to, with the confidence; NONE while nothing can be said."""
    if not session.inferred_class:
        return NONE
    return f"{cell(session.inferred_class)}({session.inferred_confidence:.2f})"


def label(session: Session) -> str:
    """One line about a label that says less, or something else, than is in force or than is done; else empty."""
    agree = {session.workload_class, session.inferred_class or session.workload_class}
    if agree == {session.declared_class}:
        return ""
    declared = f"declared as {cell(session.declared_class)}" if session.declared_class else "declared no class"
    return declared + (f"; behaves like {behaviour(session)}" if session.inferred_class else "")


def totals(pool: GetPoolResponse) -> str:
    """The pool's count of missing, unknown and contradicted labels, and what is made of them."""
    inference = enum_name(pool.config, "class_inference")
    used = "off" if inference in ("OFF", "<unknown>") else inference.lower()
    return (
        f"{pool.unlabelled_total} without a class, {pool.unknown_class_total} of a class nobody knows, "
        f"{pool.mislabelled_total} contradicted by behaviour; inference {used}, {pool.inferred_total} under an "
        "inferred class"
    )


def suspicious(pool: GetPoolResponse) -> bool:
    """Whether there is anything to say of the labels."""
    return bool(pool.unlabelled_total or pool.unknown_class_total or pool.mislabelled_total or pool.inferred_total)
