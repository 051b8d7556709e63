"""Several nodes, steady traffic, and one thing after another that goes wrong or changes: no answer
is lost, and none is another than it would have been.

Real raylets, Serve, gRPC and HTTP; only the models are tiny. One cluster for the whole file, in the
order of the file: each test leaves it as it found it.
"""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import httpx
import pytest
import yaml

from cluster import cli
from tests.support.polling import eventually
from tests.support.ray_nodes import RayNodes
from tests.support.tiny_models import make_tiny_model
from tests.support.traffic import Answer, Traffic, complete, steady_traffic

pytestmark = pytest.mark.ray
NUM_STREAMS = 8
MAX_TOKENS = 300
VERIFIER, DRAFTER, ROUTER = "verifier", "drafter", "router"


def body(index: int, mode: str) -> dict[str, Any]:
    return {
        "model": "target",
        "prompt": f"prompt number {index} ",
        "max_tokens": MAX_TOKENS,
        "seed": index,
        "temperature": 0.7 if index % 2 else 0.0,
        "ignore_eos": True,
        "speculation": {"mode": mode},
    }


BODIES = [body(index, "on") for index in range(NUM_STREAMS)]


class Deployment:
    """The Serve config that runs, to be changed and deployed again."""

    def __init__(self, nodes: RayNodes, folder: Any) -> None:
        self.nodes = nodes
        self.config = yaml.safe_load(cli.DEFAULT_CONFIG.read_text())
        self.config["http_options"] = {"host": "127.0.0.1", "port": nodes.port}
        sizes = {"max_position_embeddings": 2048}
        self.target = str(make_tiny_model(folder / "target", **sizes))
        self.other = str(make_tiny_model(folder / "other", seed=1, **sizes))
        model = {"source": self.target, "dtype": "float32", "name": "target"}
        fixed = {"planner": "fixed"}  # Drafts flow whether they pay here or not.
        self.args(VERIFIER).update(model=model, drain_grace_s=1, speculation=fixed)
        self.args(DRAFTER).update(kind="model", model=model, drain_grace_s=1)
        for name in (VERIFIER, DRAFTER, ROUTER):
            options = {"num_cpus": 1, "label_selector": {"paceline-role": name}}
            self.deployment(name).update(
                ray_actor_options=options,
                max_replicas_per_node=1,
                health_check_period_s=1,
                num_replicas=2 if name == VERIFIER else 1,
            )

    def args(self, application: str) -> dict[str, Any]:
        args: dict[str, Any] = self._application(application)["args"]
        return args

    def deployment(self, application: str) -> dict[str, Any]:
        deployment: dict[str, Any] = self._application(application)["deployments"][0]
        return deployment

    def deploy(self) -> None:
        self.nodes.deploy(copy.deepcopy(self.config))

    async def scale(self, application: str, num_replicas: int) -> dict[str, Any]:
        """Deploy with another number of replicas, and wait for it."""
        self.deployment(application)["num_replicas"] = num_replicas
        await asyncio.to_thread(self.deploy)
        kind = f"{application}s"
        return await asyncio.to_thread(self.nodes.wait_for_members, **{kind: num_replicas})

    def _application(self, name: str) -> dict[str, Any]:
        [found] = [one for one in self.config["applications"] if one["name"] == name]
        return found


@pytest.fixture(scope="module")
def deployment(tmp_path_factory):
    with RayNodes() as nodes:
        for role in (VERIFIER, VERIFIER, DRAFTER):
            nodes.add(role)
        running = Deployment(nodes, tmp_path_factory.mktemp("models"))
        running.deploy()
        nodes.wait_for_members(verifiers=2, drafters=1)
        yield running


@pytest.fixture(scope="module")
def _spare_node(deployment):
    """Where a drafter may go."""
    deployment.nodes.add(DRAFTER)


@pytest.fixture(scope="module")
def expected(deployment) -> list[Answer]:
    """What every answer must be: plain, with nothing going wrong."""
    answers = asyncio.run(plain_answers(deployment.nodes.url))
    assert {answer.end for answer in answers} == {"[DONE]"}
    assert {answer.path for answer in answers} == {"plain"}
    assert len({answer.text for answer in answers}) == NUM_STREAMS
    return answers


async def plain_answers(url: str) -> list[Answer]:
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        return await asyncio.gather(
            *(complete(http, body(index, "off")) for index in range(NUM_STREAMS))
        )


async def flowing(traffic: Traffic) -> None:
    """Until every stream is in the middle of an answer."""
    wanted = range(20, MAX_TOKENS // 2)
    await eventually(
        lambda: (
            len(traffic.progress) == NUM_STREAMS
            and all(length in wanted or length == 0 for length in traffic.progress.values())
            and sum(length > 0 for length in traffic.progress.values()) > NUM_STREAMS // 2
        ),
        30,
    )


async def some_more(traffic: Traffic, rounds: int = 1) -> None:
    """Until so many more answers came for each stream."""
    wanted = len(traffic.answers) + rounds * NUM_STREAMS
    await eventually(lambda: len(traffic.answers) >= wanted, 120, every_s=0.05)


async def test_drafts_cross_from_node_to_node(deployment, expected):
    report = deployment.nodes.cluster()
    nodes = {
        kind: {member["node_id"] for member in report[kind]} for kind in ("verifiers", "drafters")
    }
    assert len(nodes["verifiers"]) == 2
    assert len(nodes["drafters"]) == 1
    assert not nodes["verifiers"] & nodes["drafters"]
    async with steady_traffic(deployment.nodes.url, BODIES) as traffic:
        await some_more(traffic)
    assert not traffic.wrong(expected)
    assert sum(answer.num_accepted_tokens for _, answer in traffic.answers) > 0


async def test_a_verifier_node_dies(deployment, expected):
    async with steady_traffic(deployment.nodes.url, BODIES) as traffic:
        await flowing(traffic)
        report = deployment.nodes.cluster()
        victim = max(report["verifiers"], key=lambda member: member["running"])
        assert victim["running"] > 0
        await asyncio.to_thread(deployment.nodes.kill, victim["node_id"])
        await some_more(traffic)
        deployment.nodes.add(VERIFIER)
        report = await asyncio.to_thread(deployment.nodes.wait_for_members, verifiers=2)
        assert victim["replica_id"] not in {m["replica_id"] for m in report["verifiers"]}
        await some_more(traffic)
    assert not traffic.wrong(expected)


@pytest.mark.long
@pytest.mark.usefixtures("_spare_node")
async def test_drafters_are_added_and_removed(deployment, expected):
    async with steady_traffic(deployment.nodes.url, BODIES) as traffic:
        await flowing(traffic)
        await deployment.scale(DRAFTER, 2)
        await some_more(traffic)
        await deployment.scale(DRAFTER, 1)
        await some_more(traffic)
    assert not traffic.wrong(expected)


@pytest.mark.long
@pytest.mark.usefixtures("_spare_node")
async def test_a_drafter_node_dies(deployment, expected):
    """Another one is there to take its place."""
    async with steady_traffic(deployment.nodes.url, BODIES) as traffic:
        await flowing(traffic)
        [victim] = deployment.nodes.cluster()["drafters"]
        assert victim["sessions"] > 0
        await asyncio.to_thread(deployment.nodes.kill, victim["node_id"])
        await some_more(traffic)
        report = await asyncio.to_thread(deployment.nodes.wait_for_members, drafters=1)
        assert report["drafters"][0]["node_id"] != victim["node_id"]
        await some_more(traffic)
    assert not traffic.wrong(expected)


@pytest.mark.long
@pytest.mark.usefixtures("_spare_node")
async def test_the_drafters_are_rolled_to_another_model(deployment, expected):
    before = {member["replica_id"] for member in deployment.nodes.cluster()["verifiers"]}
    args = deployment.args(DRAFTER)
    async with steady_traffic(deployment.nodes.url, BODIES) as traffic:
        await flowing(traffic)
        args["model"] = args["model"] | {"source": deployment.other, "name": "other"}
        await asyncio.to_thread(deployment.deploy)
        await eventually(
            lambda: {m["model"] for m in deployment.nodes.cluster()["drafters"]} == {"other"},
            120,
            every_s=0.5,
        )
        await asyncio.to_thread(deployment.nodes.wait_for_members, drafters=1)
        await some_more(traffic)
    assert not traffic.wrong(expected)
    assert {m["replica_id"] for m in deployment.nodes.cluster()["verifiers"]} == before


@pytest.mark.long
async def test_the_serve_controller_dies(deployment, expected):
    async with steady_traffic(deployment.nodes.url, BODIES) as traffic:
        await flowing(traffic)
        await asyncio.to_thread(deployment.nodes.kill_serve_controller)
        await some_more(traffic, rounds=2)
    assert not traffic.wrong(expected)
    deployment.deploy()
    deployment.nodes.wait_for_members(verifiers=2, drafters=1)


@pytest.mark.long
async def test_verifiers_are_scaled_down_and_up(deployment, expected):
    async with steady_traffic(deployment.nodes.url, BODIES) as traffic:
        await flowing(traffic)
        await deployment.scale(VERIFIER, 1)
        await some_more(traffic)
        await deployment.scale(VERIFIER, 2)
        await some_more(traffic)
    assert not traffic.wrong(expected)
