"""Dagster as a user has it: a webserver and a daemon in processes of their own, spoken to through GraphQL."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import psycopg

ROOT = Path(__file__).parents[2]
LOCATION = "dpone_dagster"
SELECTOR = {"repositoryLocationName": LOCATION, "repositoryName": "__repository__"}


def until(what: str, look: Callable[[], Any], *, seconds: float = 240) -> Any:
    """Wait until ``look`` gives something true."""
    deadline = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.2)
    return found


def tool(name: str, *arguments: str, environment: Mapping[str, str]) -> "subprocess.CompletedProcess[str]":
    """Run one of Dagster's commands to its end."""
    return subprocess.run(
        [str(Path(sys.executable).parent / name), *arguments],
        cwd=ROOT,
        env=dict(environment),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def withdraw(conninfo: str, day: str) -> None:
    """Take a day out of the source and keep it aside."""
    with psycopg.connect(conninfo) as connection:
        connection.execute(
            f"""create table source_data.kept_{day.replace("-", "")} as
                select * from source_data.flights where time_hour::date = '{day}'"""
        )
        connection.execute("delete from source_data.flights where time_hour::date = %s", [day])


def give_back(conninfo: str, day: str) -> None:
    """Put a withdrawn day back into the source."""
    kept = f"source_data.kept_{day.replace('-', '')}"
    with psycopg.connect(conninfo) as connection:
        connection.execute(f"insert into source_data.flights select * from {kept}")
        connection.execute(f"drop table {kept}")


class Server:
    """Webserver and daemon over one DAGSTER_HOME."""

    def __init__(self, url: str) -> None:
        self.url = url

    def graphql(self, query: str, **variables: Any) -> Any:
        request = urllib.request.Request(
            f"{self.url}/graphql",
            data=json.dumps({"query": query, "variables": variables}).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            body = json.loads(answer.read())
        assert "errors" not in body, body["errors"]
        return body["data"]

    def launch(self, day: str) -> str:
        """Launch one partition of the flights as the UI's Materialize button does; return the run id."""
        answer = self.graphql(
            """mutation ($p: ExecutionParams!) { launchPipelineExecution(executionParams: $p) {
                 __typename ... on LaunchRunSuccess { run { runId } } ... on PythonError { message } } }""",
            p={
                "selector": {
                    **SELECTOR,
                    "pipelineName": "__ASSET_JOB",
                    "assetSelection": [{"path": ["flights"]}],
                    "assetCheckSelection": None,
                },
                "mode": "default",
                "executionMetadata": {"tags": [{"key": "dagster/partition", "value": day}]},
            },
        )["launchPipelineExecution"]
        assert answer["__typename"] == "LaunchRunSuccess", answer
        return str(answer["run"]["runId"])

    def backfill(self, days: list[str]) -> str:
        """Launch a backfill of the flights as the UI does; return its id."""
        answer = self.graphql(
            """mutation ($p: LaunchBackfillParams!) { launchPartitionBackfill(backfillParams: $p) {
                 __typename ... on LaunchBackfillSuccess { backfillId } ... on PythonError { message } } }""",
            p={"assetSelection": [{"path": ["flights"]}], "partitionNames": days, "title": "a week of flights"},
        )["launchPartitionBackfill"]
        assert answer["__typename"] == "LaunchBackfillSuccess", answer
        return str(answer["backfillId"])

    def backfill_status(self, backfill: str) -> str:
        return str(
            self.graphql(
                """query ($b: String!) { partitionBackfillOrError(backfillId: $b) {
                     ... on PartitionBackfill { status } } }""",
                b=backfill,
            )["partitionBackfillOrError"]["status"]
        )

    def runs_of(self, backfill: str) -> dict[str, str]:
        """Day -> run of a backfill."""
        found = self.graphql(
            """query ($f: RunsFilter!) { runsOrError(filter: $f) {
                 ... on Runs { results { runId tags { key value } } } } }""",
            f={"tags": [{"key": "dagster/backfill", "value": backfill}]},
        )["runsOrError"]["results"]
        return {tag["value"]: run["runId"] for run in found for tag in run["tags"] if tag["key"] == "dagster/partition"}

    def reexecute(self, run: str) -> str:
        """Re-execute all steps of a run as the UI's button does; return the new run's id."""
        answer = self.graphql(
            """mutation ($p: ReexecutionParams!) { launchRunReexecution(reexecutionParams: $p) {
                 __typename ... on LaunchRunSuccess { run { runId } } ... on PythonError { message } } }""",
            p={"parentRunId": run, "strategy": "ALL_STEPS"},
        )["launchRunReexecution"]
        assert answer["__typename"] == "LaunchRunSuccess", answer
        return str(answer["run"]["runId"])

    def process_of(self, run: str) -> int:
        """The process that executes a run."""
        found = (re.search(r"Executing steps in process \(pid: (\d+)\)", m) for m in self.run(run)["messages"])
        return next(int(match[1]) for match in found if match)

    def retry_of(self, run: str) -> str | None:
        """The run that Dagster launched by itself after a run's process was lost."""
        runs = self.graphql("{ runsOrError { ... on Runs { results { runId parentRunId } } } }")["runsOrError"][
            "results"
        ]
        return next((r["runId"] for r in runs if r["parentRunId"] == run), None)

    def check_states(self, check: str, days: list[str]) -> list[str]:
        """How one check of the flights stands on some days."""
        found = self.graphql(
            """query { assetNodeOrError(assetKey: {path: ["flights"]}) { ... on AssetNode { partitionKeys
                 assetChecksOrError { ... on AssetChecks { checks { name partitionStatuses {
                   ... on AssetCheckTimePartitionStatuses { ranges { status startKey endKey } } } } } } } } }"""
        )["assetNodeOrError"]
        (one,) = (c for c in found["assetChecksOrError"]["checks"] if c["name"] == check)
        states = {}
        for part in one["partitionStatuses"]["ranges"]:
            keys = found["partitionKeys"]
            for key in keys[keys.index(part["startKey"]) : keys.index(part["endKey"]) + 1]:
                states[key] = part["status"]
        return [states[day] for day in days]

    def terminate(self, run: str) -> None:
        answer = self.graphql(
            """mutation ($r: String!) { terminateRun(runId: $r, terminatePolicy: SAFE_TERMINATE) {
                 __typename ... on TerminateRunFailure { message } } }""",
            r=run,
        )["terminateRun"]
        assert answer["__typename"] == "TerminateRunSuccess", answer

    def run(self, run: str) -> dict[str, Any]:
        """Status, tags and the log's messages of a run."""
        found = self.graphql(
            """query ($r: ID!) { runOrError(runId: $r) { ... on Run {
                 status tags { key value }
                 eventConnection { events { __typename ... on MessageEvent { message } } } } } }""",
            r=run,
        )["runOrError"]
        return {
            "status": found["status"],
            "tags": {t["key"]: t["value"] for t in found["tags"]},
            "messages": [e.get("message", "") for e in found["eventConnection"]["events"]],
        }

    def ended(self, run: str) -> dict[str, Any]:
        """Wait for a run's end."""

        def look() -> dict[str, Any] | None:
            found = self.run(run)
            return found if found["status"] in ("SUCCESS", "FAILURE", "CANCELED") else None

        return dict(until(f"the end of run {run}", look))

    def partitions(self) -> tuple[set[str], set[str]]:
        """The flights' materialized and failed days, as the asset page shows them."""
        found = self.graphql(
            """query { assetNodeOrError(assetKey: {path: ["flights"]}) { ... on AssetNode {
                 assetPartitionStatuses { ... on TimePartitionStatuses { ranges { status startKey endKey } } }
                 partitionKeys } } }"""
        )["assetNodeOrError"]
        keys = found["partitionKeys"]
        states: dict[str, set[str]] = {"MATERIALIZED": set(), "FAILED": set()}
        for part in found["assetPartitionStatuses"]["ranges"]:
            if part["status"] in states:
                states[part["status"]] |= set(keys[keys.index(part["startKey"]) : keys.index(part["endKey"]) + 1])
        return states["MATERIALIZED"], states["FAILED"]


@contextmanager
def serving(command: Sequence[str], environment: Mapping[str, str], log: Path) -> Iterator[Server]:
    """Start webserver and daemon on loopback by ``dagster dev`` or ``dg dev``, and stop them and their children."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    program, *arguments = command
    with log.open("w") as output:
        process = subprocess.Popen(
            [str(Path(sys.executable).parent / program), *arguments, "-h", "127.0.0.1", "-p", str(port)],
            cwd=ROOT,
            env=dict(environment),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    server = Server(f"http://127.0.0.1:{port}")

    def loaded() -> bool:
        assert process.poll() is None, log.read_text()
        try:
            return bool(server.graphql("{ assetNodes { id } }")["assetNodes"])
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    try:
        until("the webserver", loaded)
        yield server
    finally:
        children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
        process.wait()
        for child in psutil.wait_procs(children, timeout=10)[1]:
            with suppress(psutil.NoSuchProcess):
                child.kill()


def environment_of(home: Path) -> dict[str, str]:
    """The environment of a user whose DPONE_HOME is ``home``."""
    return {
        **os.environ,
        "DPONE_HOME": str(home),
        "DAGSTER_HOME": str(home / "dagster"),
        "DO_NOT_TRACK": "1",
        "PYTHONPATH": str(ROOT),
    }
