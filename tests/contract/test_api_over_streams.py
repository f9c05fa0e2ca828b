"""What holds for unary calls holds for the same calls over a stream: their tests, with a stream behind the stub.

Left out: what is told in the trailers of a call, and deadlines of single calls, which a stream has not.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.conftest import Backend
from tests.contract.conftest import Planes, planes_on
from tests.contract.plane import Plane
from tests.contract.streams import StreamStub
from tests.contract.test_api_calls import (  # noqa: F401
    test_a_hold_says_why_where_and_when_to_ask_again,
    test_a_placement_and_its_lease,
    test_a_rejection_is_final_and_says_why,
    test_a_release_says_what_the_session_cost,
    test_an_answer_is_replayed_by_every_server,
    test_an_unknown_pool,
    test_any_character_is_legal_in_a_name,
    test_capacity_that_came_free_is_seen_at_once,
    test_errors_carry_a_stable_reason,
    test_no_error_repeats_a_token,
    test_observe_places_everybody_and_says_what_it_would_have_done,
    test_the_class_in_force_is_answered,
)
from tests.contract.test_api_homes import (  # noqa: F401
    test_a_cancelled_move_keeps_the_session,
    test_a_draining_home_hands_over_and_takes_nobody,
    test_a_lease_ends_by_itself,
    test_a_lost_home_holds_until_there_is_another,
    test_a_paused_home_holds_until_it_serves_again,
    test_a_restart_moves_its_sessions_ahead_of_those_that_wait,
    test_two_servers_are_one_pool,
)
from tests.contract.test_api_waiting import (  # noqa: F401
    _only_woken,
    test_a_call_cancelled_while_it_is_carried_out_leaves_nothing,
    test_a_cancelled_wait_leaves_nothing,
    test_a_crowd_gets_in_one_by_one_and_nobody_is_lost,
    test_a_release_through_another_server_wakes_who_waits,
    test_a_release_wakes_who_waits,
    test_a_server_that_ends_says_where_its_waiters_stand,
    test_a_session_that_gets_in_elsewhere_is_told_so,
    test_a_session_that_is_released_while_it_waits_is_told_so,
    test_pollers_and_waiters_share_one_queue,
    test_siblings_get_in_together,
    test_the_end_of_the_wait_is_a_hold,
    test_the_newer_of_two_waits_for_one_session_takes_over,
    test_the_retry_of_a_broken_wait_is_not_taken_back_with_it,
    test_who_waits_gets_in_in_order_of_first_arrival,
)
from tests.properties.test_traffic import test_traffic_leaves_nothing_behind  # noqa: F401


def _over_a_stream(plane: Plane) -> None:
    plane.stub = StreamStub(plane.stub)


@pytest.fixture
async def planes(backend: Backend) -> AsyncIterator[Planes]:
    """As elsewhere, with a stream behind each plane's stub."""
    async for start in planes_on(backend, _over_a_stream):
        yield start
