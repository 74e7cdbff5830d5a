"""The alert rules of examples/: each reads as PromQL, and names only metrics that are there, with their labels."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from engine.cli.run import ExitCode
from engine.metrics.names import METRICS

RULES = Path(__file__).parents[4] / "examples" / "prometheus" / "tidemark.rules.yml"
GROUPS: list[dict[str, Any]] = yaml.safe_load(RULES.read_text())["groups"]
ALERTS = [rule for group in GROUPS for rule in group["rules"]]


def selectors(expression: Any) -> list[Any]:
    """The selectors of metrics in an expression."""
    if type(expression).__name__ == "VectorSelector":
        return [expression]
    if type(expression).__name__ == "MatrixSelector":
        return selectors(expression.vector_selector)
    below = [getattr(expression, name, None) for name in ("lhs", "rhs", "expr", "param")]
    below += list(getattr(expression, "args", None) or ())
    return [found for part in below if part is not None for found in selectors(part)]


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_an_alert_reads_and_names_metrics_that_are_there(alert: dict[str, Any]) -> None:
    found = selectors(promql_parser.parse(alert["expr"]))
    names = {selector.name for selector in found}
    assert names
    # The walk above has missed nothing.
    assert names == set(re.findall(r"tidemark_\w+", alert["expr"]))
    for selector in found:
        assert selector.name in METRICS, selector.name
        matched = {matcher.name for matcher in selector.matchers.matchers}
        assert matched <= set(METRICS[selector.name].labels)
    assert alert["labels"]["severity"] in {"critical", "warning"}
    assert alert["annotations"]["summary"].endswith(".")


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_what_an_alert_reports_is_a_label_of_its_metrics(alert: dict[str, Any]) -> None:
    shown = set(re.findall(r"\$labels\.(\w+)", alert["annotations"]["summary"]))
    by = re.search(r"sum by \(([\w, ]+)\)", alert["expr"])
    labels = [set(METRICS[name].labels) for name in re.findall(r"tidemark_\w+", alert["expr"])]
    left = {word.strip() for word in by[1].split(",")} if by is not None else set.intersection(*labels)
    assert shown <= left


def test_every_alert_of_the_list_is_there_and_none_twice() -> None:
    names = [alert["alert"] for alert in ALERTS]
    assert len(names) == len(set(names))
    assert {
        "TidemarkNoGoodCommit",
        "TidemarkVerificationFailed",
        "TidemarkBlobsAtRisk",
        "TidemarkOrphansGrow",
        "TidemarkCollectionOverdue",
        "TidemarkRestoreDrillOverSlo",
        "TidemarkRetryStorm",
    } <= set(names)


# For each alert, series that make it fire within a day and a third, a value for each twenty minutes.
FIRING = {
    "TidemarkNoGoodCommit": {'tidemark_last_commit_timestamp_seconds{job_name="j",task=""}': "-10000x100"},
    "TidemarkCannotReadRepository": {"tidemark_repository_up": "0x100"},
    "TidemarkVerificationFailed": {'tidemark_verification_failures_total{kind="blob_missing"}': "0+1x100"},
    "TidemarkBlobsAtRisk": {'tidemark_blobs_at_risk{reason="ttl"}': "1x100"},
    "TidemarkOrphansGrow": {
        'tidemark_orphan_bytes{state="expired"}': "1000+10x100",
        'tidemark_orphan_bytes{state="waiting"}': "0x100",
        "tidemark_repository_bytes": "2000x100",
    },
    "TidemarkCollectionOverdue": {
        "tidemark_last_collection_timestamp_seconds": "-10000x100",
        "tidemark_repository_collection_period_seconds": "600x100",
    },
    "TidemarkCollectionsFail": {"tidemark_collections_failed": "2x100"},
    "TidemarkRunFailed": {'tidemark_run_exit_code{verb="verify",job_name="j"}': "4x100"},
    "TidemarkRunMissing": {'tidemark_run_last_success_timestamp_seconds{verb="backup",job_name="j"}': "-10000x100"},
    "TidemarkRunNeverSucceeded": {'tidemark_run_end_timestamp_seconds{verb="backup",job_name="new"}': "7x100"},
    "TidemarkRestoreDrillOverSlo": {
        'tidemark_restore_drill_seconds{verb="bench restore",job_name="j"}': "61x100",
        'tidemark_restore_drill_slo_seconds{verb="bench restore",job_name="j"}': "60x100",
    },
    "TidemarkRestoreDrillMissing": {
        'tidemark_run_end_timestamp_seconds{verb="bench restore",job_name="j"}': "-1300000x100"
    },
    "TidemarkRetryStorm": {
        'tidemark_store_retries_total{verb="backup",job_name="j"}': "0+2x100",
        'tidemark_store_requests_total{verb="backup",job_name="j",operation="get"}': "0+10x100",
        'tidemark_store_requests_total{verb="backup",job_name="j",operation="stat"}': "0+5x100",
    },
}
# The same series as they are when all is well.
QUIET = {
    "-10000x100": "0+1200x100",
    "-1300000x100": "0+1200x100",
    "0x100": "0x100",
    "0+1x100": "0x100",
    "1x100": "0x100",
    "2x100": "0x100",
    "4x100": "0x100",
    "61x100": "59x100",
    "0+2x100": "0+1x100",
    "1000+10x100": "1000x100",
}


def rule_test(series: dict[str, str], *, fire: bool) -> dict[str, Any]:
    """A unit test of promtool: what fires is asked as a query, so that the texts of alerts need not be repeated."""
    asked = [f'count(ALERTS{{alertname="{alert}",alertstate="firing"}}) > 0' for alert in FIRING]
    expected = [{"labels": "{}", "value": 1}] if fire else []
    return {
        "interval": "20m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [{"expr": query, "eval_time": "32h", "exp_samples": expected} for query in asked],
    }


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool, of Prometheus, is not installed")
def test_each_alert_fires_when_it_should_and_none_when_all_is_well(tmp_path: Path) -> None:
    assert set(FIRING) == {alert["alert"] for alert in ALERTS}
    ill = {name: values for series in FIRING.values() for name, values in series.items()}
    well = {name: QUIET.get(values, values) for name, values in ill.items() if not name.endswith("_up")}
    well['tidemark_run_last_success_timestamp_seconds{verb="backup",job_name="new"}'] = "0+1200x100"
    check(tmp_path, [rule_test(ill, fire=True), rule_test(well, fire=False)])


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool, of Prometheus, is not installed")
def test_a_run_that_the_machine_ended_has_failed_and_one_that_somebody_stopped_has_not(tmp_path: Path) -> None:
    failed = {code: code not in {ExitCode.OK, ExitCode.SLOW, ExitCode.INTERRUPTED} for code in ExitCode}
    assert failed[ExitCode.TERMINATED]
    series = {f'tidemark_run_exit_code{{verb="backup",job_name="{int(code)}"}}': f"{int(code)}x100" for code in failed}
    query = 'count by (job_name) (ALERTS{alertname="TidemarkRunFailed",alertstate="firing"})'
    expected = [{"labels": f'{{job_name="{int(code)}"}}', "value": 1} for code, fires in failed.items() if fires]
    check(
        tmp_path,
        [
            {
                "interval": "20m",
                "input_series": [{"series": name, "values": values} for name, values in series.items()],
                "promql_expr_test": [{"expr": query, "eval_time": "2h", "exp_samples": expected}],
            }
        ],
    )


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool, of Prometheus, is not installed")
def test_what_a_first_verify_finds_is_an_alert(tmp_path: Path) -> None:
    """Its counter begins with that number, and does not increase."""
    labels = 'verb="verify",job_name="j",kind="altered"'
    series = {"tidemark_verify_problems": "1x100", "tidemark_verification_failures_total": "1x100"}
    query = 'count by (kind) (ALERTS{alertname="TidemarkVerificationFailed",alertstate="firing"})'
    expected = [{"labels": '{kind="altered"}', "value": 1}]
    check(
        tmp_path,
        [
            {
                "interval": "20m",
                "input_series": [{"series": f"{name}{{{labels}}}", "values": v} for name, v in series.items()],
                "promql_expr_test": [{"expr": query, "eval_time": "32h", "exp_samples": expected}],
            }
        ],
    )


def check(tmp_path: Path, tests: list[dict[str, Any]]) -> None:
    """Have promtool run unit tests of the rules."""
    file = tmp_path / "alerts.test.yml"
    file.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "20m", "tests": tests}))
    done = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
