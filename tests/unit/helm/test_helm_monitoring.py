"""Alerts, dashboard and ServiceMonitor: queries that parse, metrics that exist, series that are found."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import promql_parser
import pytest

from tests.unit.helm.chart import MONITORING, NAME, NAMESPACE, Helm, selects
from tests.unit.server.exposed import served

#: The server's metrics and their labels.
METRICS = {
    "moorage_decisions_total": {"pool", "rpc", "decision", "reason"},
    "moorage_rpc_seconds_bucket": {"rpc", "code", "le"},
    "moorage_sessions": {"pool", "workload_class", "state"},
    "moorage_held_sessions": {"pool", "workload_class", "reason"},
    "moorage_completed_total": {"pool", "workload_class"},
    "moorage_pool_mode": {"pool", "mode"},
    "moorage_ready": set(),
    "moorage_hold_age_seconds": {"pool", "workload_class"},
    "moorage_blocks": {"pool", "instance", "dp_rank", "kind"},
    "moorage_session_cap": {"pool", "instance", "dp_rank"},
    "moorage_pressure": {"pool", "instance", "dp_rank"},
    "moorage_brake": {"pool", "instance", "dp_rank"},
    "moorage_continuation_hit_ratio": {"pool", "workload_class"},
    "moorage_mixture_share": {"pool", "workload_class", "kind"},
    "moorage_mixture_deviation_points": {"pool"},
    "moorage_mixture_samples": {"pool"},
    "moorage_reference_blocks": {"pool", "workload_class"},
    "moorage_residency_seconds": {"pool", "workload_class"},
    "moorage_instance_freshness": {"pool", "instance", "dp_rank", "freshness"},
    "moorage_instance_age_seconds": {"pool", "instance", "dp_rank"},
    "moorage_instance_stalled": {"pool", "instance", "dp_rank"},
    "moorage_instance_updating_weights": {"pool", "instance", "dp_rank"},
    "moorage_lease_expiries_total": {"pool"},
    "moorage_store_seconds_bucket": {"script", "le"},
    "moorage_store_errors_total": {"kind"},
    "moorage_epochs_total": {"pool"},
    "moorage_demand_sessions": {"pool"},
    "up": set(),
}
#: What Prometheus adds.
TARGET = {"namespace", "service", "pod"}
#: Grafana's variables in durations.
INTERVALS = re.compile(r"\$__(rate_interval|range)")


@pytest.fixture(scope="session")
def alerts(helm: Helm) -> list[dict[str, Any]]:
    (group,) = helm.render("monitoring").one("PrometheusRule")["spec"]["groups"]
    return list(group["rules"])


@pytest.fixture(scope="session")
def dashboard(helm: Helm) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(
        helm.render("monitoring").one("ConfigMap", f"{NAME}-dashboard")["data"]["moorage.json"]
    )
    return loaded


def _queries(dashboard: dict[str, Any]) -> Iterator[str]:
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            yield INTERVALS.sub("5m", target["expr"])


def _parts(query: str) -> list[Any]:
    found: list[Any] = []

    def keep(part: Any) -> None:
        found.append(part)

    promql_parser.walk(promql_parser.parse(query), keep)
    return found


def _metrics(query: str) -> set[str]:
    return {str(part.name) for part in _parts(query) if isinstance(part, promql_parser.VectorSelector)}


def _complaints(query: str) -> list[str]:
    """Metrics and labels in a query that the server does not have."""
    complaints: list[str] = []
    for part in _parts(query):
        if isinstance(part, promql_parser.VectorSelector):
            if part.name not in METRICS:
                complaints.append(f"no metric {part.name}")
                continue
            labels = {matcher.name for matcher in part.matchers.matchers}
            complaints += [f"{part.name} has no {name}" for name in labels - METRICS[part.name] - TARGET]
        if isinstance(part, promql_parser.AggregateExpr) and part.modifier is not None:
            known = set().union(TARGET, *(METRICS.get(name, set()) for name in _metrics(part.expr.prettify())))
            complaints += [f"nothing below has {name}" for name in set(part.modifier.labels) - known]
    return complaints


def test_the_check_of_queries_finds_slips() -> None:
    assert _complaints('moorage_brakes{pool="p"} < 1') == ["no metric moorage_brakes"]
    assert _complaints('max by (rpc) (moorage_brake{clas="p"})') == [
        "nothing below has rpc",
        "moorage_brake has no clas",
    ]


def test_the_server_has_these_metrics() -> None:
    known = served() | {"up": set()}
    assert {name: known.get(name) for name in METRICS} == METRICS


def test_alerts_ask_for_what_is_measured(alerts: list[dict[str, Any]]) -> None:
    for alert in alerts:
        assert _complaints(alert["expr"]) == [], alert["alert"]


def test_the_dashboard_asks_for_what_is_measured(dashboard: dict[str, Any]) -> None:
    queries = list(_queries(dashboard))
    assert len(queries) > 30
    for query in queries:
        assert _complaints(query) == [], query


def test_every_metric_is_shown_or_watched(alerts: list[dict[str, Any]], dashboard: dict[str, Any]) -> None:
    asked = [alert["expr"] for alert in alerts] + list(_queries(dashboard))
    assert set().union(*(_metrics(query) for query in asked)) == METRICS.keys()


def test_gauges_of_the_pool_are_not_added_up_over_servers(dashboard: dict[str, Any]) -> None:
    """Every server tells of the whole pool: a sum right over the series would count each of them."""
    for query in _queries(dashboard):
        for part in _parts(query):
            if isinstance(part, promql_parser.AggregateExpr) and str(part.op) == "sum":
                assert not isinstance(part.expr, promql_parser.VectorSelector), query


def test_the_situations_that_need_somebody_have_an_alert(alerts: list[dict[str, Any]]) -> None:
    assert [alert["alert"].removeprefix("Moorage") for alert in alerts] == [
        "StoreDown", "NotReady", "Down", "AllInstancesStale", "InstanceLost", "WeightUpdateLong", "HoldAge",
        "MixtureDrift", "LeakSuspected", "ContinuationMisses", "BrakeEngaged",
    ]  # fmt: skip
    for alert in alerts:
        assert alert["labels"]["severity"] in ("critical", "warning")
        assert re.fullmatch(r"\d+m", alert["for"])
        assert len(alert["annotations"]["runbook"].split()) > 40
        assert set(alert["annotations"]) == {"summary", "description", "runbook"}


def test_labels_in_the_words_of_an_alert_are_those_it_keeps(alerts: list[dict[str, Any]]) -> None:
    for alert in alerts:
        named = {name for text in alert["annotations"].values() for name in re.findall(r"\$labels\.(\w+)", text)}
        kept = re.search(r"by \(([^)]*)\)", alert["expr"])
        assert named <= set(re.findall(r"\w+", kept[1] if kept else "")), alert["alert"]


def test_thresholds_are_filled_in(helm: Helm, alerts: list[dict[str, Any]]) -> None:
    texts = json.dumps(alerts)
    assert re.findall(r"<[a-zA-Z]+>", texts) == []
    (hold,) = (alert for alert in alerts if alert["alert"] == "MoorageHoldAge")
    assert hold["expr"].endswith("> 600")
    rule = helm.render("monitoring", "prometheusRule.thresholds.leakMinutes=45", 'prometheusRule.selector=job="m"')
    changed = {alert["alert"]: alert for alert in rule.one("PrometheusRule")["spec"]["groups"][0]["rules"]}
    assert changed["MoorageLeakSuspected"]["for"] == "45m"
    assert changed["MoorageDown"]["expr"] == 'absent(up{job="m"} == 1)'


def test_alerts_watch_the_series_of_this_release(helm: Helm, alerts: list[dict[str, Any]]) -> None:
    rendered = helm.render("monitoring")
    service = rendered.one("Service", f"{NAME}-headless")["metadata"]["name"]
    for alert in alerts:
        assert f'namespace="{NAMESPACE}",service="{service}"' in alert["expr"]


def test_every_server_is_read_once(helm: Helm) -> None:
    """One Service has the port, and the labels that are looked for."""
    rendered = helm.render("monitoring")
    monitor = rendered.one("ServiceMonitor")["spec"]
    (endpoint,) = monitor["endpoints"]
    assert endpoint["honorLabels"] is True
    found = [
        service["metadata"]["name"]
        for service in rendered.of("Service")
        if selects(monitor["selector"]["matchLabels"], service["metadata"]["labels"])
        and endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    ]
    assert found == [f"{NAME}-headless"]


def test_the_operators_kinds_are_left_out_where_the_cluster_has_none(helm: Helm) -> None:
    without = helm.render("monitoring", apis=())
    assert without.of("ServiceMonitor") == without.of("PrometheusRule") == []
    assert {"ServiceMonitor", "PrometheusRule"} <= {manifest["kind"] for manifest in helm.render("monitoring")}
    assert [manifest for manifest in helm.render() if manifest["apiVersion"] == MONITORING] == []


def test_nothing_is_read_where_nothing_is_measured(helm: Helm) -> None:
    assert helm.render("monitoring", "metrics.enabled=false").of("ServiceMonitor") == []


def test_the_dashboard_answers_three_questions(dashboard: dict[str, Any]) -> None:
    rows = [panel["title"] for panel in dashboard["panels"] if panel["type"] == "row"]
    assert rows[:3] == [
        "Is the pool thrashing?",
        "Who is waiting, and why?",
        "Is the mixture what the trainer asked for?",
    ]


def test_panels_explain_themselves_and_do_not_overlap(dashboard: dict[str, Any]) -> None:
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {(place["x"] + across, place["y"] + down) for across in range(place["w"]) for down in range(place["h"])}
        assert max(x for x, _ in cells) < 24
        assert not cells & taken, panel["title"]
        taken |= cells
        if panel["type"] != "row":
            assert panel["description"].endswith("."), panel["title"]
            assert panel["datasource"]["uid"] == "${datasource}"


def test_the_dashboard_is_found_by_the_sidecar(helm: Helm) -> None:
    metadata = helm.render("monitoring").one("ConfigMap", f"{NAME}-dashboard")["metadata"]
    assert metadata["labels"]["grafana_dashboard"] == "1"
    assert metadata["annotations"] == {"grafana_folder": "RL"}
