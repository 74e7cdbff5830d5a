"""A DAG for Airflow 3 that takes care of a repository every night: backup, verification, restore drill, collection.

Copy it into the folder of DAGs. Tidemark is a command in an environment of its own, so that its packages and those of
Airflow do not meet; nothing of it is imported here. The chain of AWS's tools finds credentials on the worker: no
variable holds them. Airflow's variables, all of them optional:

    tidemark_command     the command                      default: /opt/tidemark/bin/tidemark
    tidemark_repository  the repository                   default: s3://backups/state
    tidemark_checkpoint  a streaming checkpoint           default: none, and the backup is skipped
    tidemark_job         the job that it is backed up as  default: flights
    tidemark_scratch     where the drill restores to      default: /var/tmp
    tidemark_policy      the retention                    default: /etc/tidemark/retention.toml
"""

import datetime as dt
import logging
import subprocess

from airflow.sdk import Variable, chain, dag, task
from airflow.sdk.exceptions import AirflowException, AirflowFailException, AirflowSkipException


def run_tidemark(verb: str, *words: str) -> None:
    """Run one command; what it says goes to the log of the task.

    Raises:
        AirflowException: The blob store was unavailable or full. Nothing is lost, and Airflow tries again.
        AirflowFailException: A person has to look. Airflow does not try again.
    """
    url = Variable.get("tidemark_repository", default="s3://backups/state")
    program = Variable.get("tidemark_command", default="/opt/tidemark/bin/tidemark")
    command = [program, *verb.split(), *words, "--repository", url]
    try:
        started = subprocess.Popen(  # noqa: S603
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
    except OSError as error:
        raise AirflowFailException(f"a person has to look: {error}") from error
    with started as process:
        assert process.stdout is not None  # noqa: S101  # as it is a pipe
        try:
            for line in process.stdout:
                print(line, end="", flush=True)
        except BaseException:  # somebody stopped the task, or its time is over
            process.terminate()
            raise
    match process.returncode:
        case 0:
            return
        case 3:
            logging.getLogger(__name__).warning("done in part (3): the next run does the rest")
        case 5:
            raise AirflowException("the blob store was unavailable or full (5)")
        case code:  # damage (4), too much to delete (10), a slow restore (11), and all others
            raise AirflowFailException(f"a person has to look: tidemark {verb} ended with {code}")


def job() -> str:
    """Return the name of the job: the one that is backed up is the one that the drill restores."""
    return str(Variable.get("tidemark_job", default="flights"))


@dag(
    schedule="10 2 * * *",
    start_date=dt.datetime(2026, 1, 1, tzinfo=dt.UTC),
    catchup=False,  # one run is enough for all nights that were missed
    max_active_runs=1,  # with the chain below: one command at a time
    default_args={"retries": 3, "retry_delay": dt.timedelta(minutes=10), "execution_timeout": dt.timedelta(hours=2)},
)
def tidemark_nightly() -> None:
    """Backs up a checkpoint, verifies the repository, restores as a drill, and deletes what nobody needs."""

    @task
    def backup() -> None:
        checkpoint = Variable.get("tidemark_checkpoint", default="")
        if not checkpoint:
            raise AirflowSkipException("no tidemark_checkpoint")
        run_tidemark("spark backup", checkpoint, "--job", job())

    @task(trigger_rule="none_failed")  # a backup that was skipped is none that failed
    def verify() -> None:
        run_tidemark("verify", "--level", "content", "--sample", "0.1")

    @task
    def drill() -> None:
        scratch = Variable.get("tidemark_scratch", default="/var/tmp")  # noqa: S108  # it makes a directory of its own there
        run_tidemark("bench restore", "--job", job(), "--to", scratch, "--slo", "5m", "--one-line")

    @task
    def collect() -> None:
        policy = Variable.get("tidemark_policy", default="/etc/tidemark/retention.toml")
        run_tidemark("collect", "--policy", policy, "--one-line")

    # Nothing is deleted in a night in which something is wrong.
    chain(backup(), verify(), drill(), collect())


tidemark_nightly()
