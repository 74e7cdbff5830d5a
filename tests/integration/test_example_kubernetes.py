"""The example for Kubernetes: its file fits the schema, and its containers run with what it mounts."""

import re
from pathlib import Path
from typing import Any, Final

import kubernetes_validate
import pytest
import yaml

from tests.integration.conftest import Shell, content
from tests.integration.schedules import check_schedule

EXAMPLE: Final = Path(__file__).parents[2] / "examples" / "kubernetes"
DOCUMENTS: Final[list[dict[str, Any]]] = list(yaml.safe_load_all((EXAMPLE / "tidemark.yaml").read_text()))
JOBS: Final = {document["metadata"]["name"]: document for document in DOCUMENTS if document["kind"] == "CronJob"}
(CONFIG_MAP,) = (document for document in DOCUMENTS if document["kind"] == "ConfigMap")
MOUNTED: Final = "/etc/tidemark"
SCRATCH: Final = "/scratch"


def pod_of(job: dict[str, Any]) -> dict[str, Any]:
    pod: dict[str, Any] = job["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    return pod


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document["metadata"]["name"])
@pytest.mark.parametrize("release", ["1.31", kubernetes_validate.latest_version()])
def test_it_fits_the_schema(document: dict[str, Any], release: str) -> None:
    kubernetes_validate.validate(document, release, strict=True)


def test_the_schema_refuses_what_is_misspelt() -> None:
    job = yaml.safe_load(yaml.safe_dump(JOBS["tidemark-collect"]))
    job["spec"]["concurencyPolicy"] = job["spec"].pop("concurrencyPolicy")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, "1.31", strict=True)


def test_there_is_no_secret() -> None:
    text = (EXAMPLE / "tidemark.yaml").read_text()
    assert {document["kind"] for document in DOCUMENTS} == {"ServiceAccount", "ConfigMap", "CronJob"}
    assert not re.search(r"secret(Key|Ref|Name)|AWS_(SECRET|ACCESS|SESSION)\w*:", text, re.IGNORECASE)
    accounts = {document["metadata"]["name"] for document in DOCUMENTS if document["kind"] == "ServiceAccount"}
    assert {pod_of(job)["serviceAccountName"] for job in JOBS.values()} == accounts


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS.keys())
def test_its_jobs_end_do_not_overlap_and_may_do_little(job: dict[str, Any]) -> None:
    check_schedule(job["spec"]["schedule"])
    assert job["spec"]["concurrencyPolicy"] == "Forbid"
    assert job["spec"]["jobTemplate"]["spec"]["activeDeadlineSeconds"] > 0
    pod = pod_of(job)
    assert pod["securityContext"]["runAsNonRoot"]
    (container,) = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert {"requests", "limits"} <= container["resources"].keys()
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes[mounts[MOUNTED]]["configMap"]["name"] == CONFIG_MAP["metadata"]["name"]
    assert "emptyDir" in volumes[mounts[SCRATCH]]


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS.keys())
def test_its_containers_run_with_the_files_that_are_mounted(two_commits: Shell, job: dict[str, Any]) -> None:
    shell = two_commits
    places = {
        MOUNTED: str(shell.directory / "etc"),
        SCRATCH: str(shell.directory / "scratch"),
        "s3://backups/state": shell.environment["TIDEMARK_REPOSITORY"],
    }

    def here(text: str) -> str:
        for place, substitute in places.items():
            text = text.replace(place, substitute)
        return text

    (shell.directory / "scratch").mkdir()
    shell.tree("etc", {name: here(text).encode() for name, text in CONFIG_MAP["data"].items()})
    (container,) = pod_of(job)["containers"]
    # What the container does not set is not set.
    shell.environment = {entry["name"]: here(entry["value"]) for entry in container["env"]}
    result = shell.run(*map(here, container["args"]))
    expected = {
        "tidemark-collect": "deleted 0 keys",
        "tidemark-verify": "no damage",
        "tidemark-drill-flights": "SLO 5m: met",
    }
    assert expected[job["metadata"]["name"]] in result.stdout
    assert not [path for path in content(shell.directory / "scratch") if not path.startswith("cache/")]


def test_the_image_has_the_wheel_and_the_pinned_versions() -> None:
    lines = (EXAMPLE / "Dockerfile").read_text().splitlines()
    (copied,) = (line.split()[1:-1] for line in lines if line.startswith("COPY"))
    assert copied == ["constraints.txt", "dist/tidemark-*.whl"]
    users = {pod_of(job)["securityContext"]["runAsUser"] for job in JOBS.values()}
    (user,) = (line.split()[1] for line in lines if line.startswith("USER"))
    assert users == {int(user.partition(":")[0])}
    assert lines[-1] == 'ENTRYPOINT ["tidemark"]'
