"""What Admit and Place do once they are checked: the same in a unary call and in a stream."""

from __future__ import annotations

import asyncio

from moorage.v1 import scheduler_pb2 as pb
from moorage_server.api import answers
from moorage_server.core.config import OBSERVE
from moorage_server.runtime.admissions import OnWait
from moorage_server.runtime.arrivals import Arrival
from moorage_server.runtime.desk import Desk
from moorage_server.store.records import OnHold, Placed


async def admit(
    desk: Desk, request: pb.AdmitRequest, wait_s: float, on_wait: OnWait | None = None
) -> tuple[pb.AdmitResponse, Arrival]:
    """The answer, and what the desk abandons where nobody hears it. A cancelled call leaves nothing behind."""
    view = await desk.view()
    arrival = answers.arrival_of(request, view)
    result, verdict = await desk.admit(arrival, wait_s, on_wait)
    response = pb.AdmitResponse()
    if isinstance(result, Placed):
        try:
            known = await desk.view_with(result)
        except asyncio.CancelledError:
            desk.abandon(arrival)
            raise
        answers.fill_placed(response, known, result)
        if view.config.mode == OBSERVE and verdict.reason:
            response.hold.CopyFrom(answers.would_hold(view, verdict))
    else:
        answers.fill_held(response, result)
    return response, arrival


async def placed(desk: Desk, result: Placed | OnHold) -> pb.PlaceResponse:
    """The answer to a Place."""
    response = pb.PlaceResponse()
    if isinstance(result, Placed):
        response.moved = result.moved
        answers.fill_placed(response, await desk.view_with(result), result)
    else:
        answers.fill_held(response, result)
    return response
