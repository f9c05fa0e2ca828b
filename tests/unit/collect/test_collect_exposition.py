import pytest

from moorage.collect.exposition import NotMetrics, parse_page
from tests.unit.collect.fakes import recording


def test_a_series_is_found_by_name_and_labels_not_by_position() -> None:
    page = parse_page('x{engine="0",state="awake"} 0\nx{engine="0",state="off"} 1\nx{engine="1",state="awake"} 7\n')
    assert page.value("x", engine="0", state="off") == 1
    assert page.value("x", engine="1") == 7
    assert page.label_values("x", "engine") == {"0", "1"}


def test_what_is_missing_ambiguous_or_not_finite_is_unknown() -> None:
    page = parse_page('x{engine="0",state="a"} 1\nx{engine="0",state="b"} 2\nnan NaN\ninf +Inf\n')
    assert page.value("y") is None
    assert page.value("x", engine="0") is None
    assert page.value("x", engine="0", state="c") is None
    assert page.labels("x", engine="0") is None
    assert page.value("nan") is None
    assert page.value("inf") is None


def test_exponents_are_numbers() -> None:
    page = parse_page('usage{engine="0"} 9.75e-06\ntokens_total{engine="0"} 4.632094e+06\n')
    assert page.value("usage", engine="0") == 0.00000975
    assert page.value("tokens_total", engine="0") == 4_632_094


def test_a_whole_recording_is_read_without_buckets_and_creation_times() -> None:
    page = parse_page(recording("lifecycle_04"))
    assert page.value("vllm:iteration_tokens_total_sum", engine="0") == 11_995
    assert page.value("vllm:prompt_tokens_total", engine="0") == 12_003
    assert page.value("vllm:prompt_tokens_created", engine="0") is None
    assert page.label_values("vllm:iteration_tokens_total_bucket", "le") == set()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n\n",
        "# HELP only comments\n",
        "<html><body>502 Bad Gateway</body></html>",
        '{"detail":"Not Found"}',
        "hello world",
        'x{engine="0" 1\n',
        "x 1\nx{engine=} nonsense\n",
        "\ufffd\ufffd\x00\x01",
    ],
)
def test_what_is_not_metrics_is_refused(text: str) -> None:
    with pytest.raises(NotMetrics):
        parse_page(text)
