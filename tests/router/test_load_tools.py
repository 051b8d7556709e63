"""What load tools and lm-eval ask beside generation."""

from __future__ import annotations

from cluster.load import VerifierLoad
from router.tokenizer import Tokenizer
from tests.router.deployment import Deployment
from tests.support.polling import eventually
from tests.support.scripted_verifier import CHAT_TEMPLATE, make_card

TOKENIZER = Tokenizer(make_card())


async def test_models_have_their_window(deployment: Deployment) -> None:
    body = (await deployment.client.get("/v1/models")).json()
    assert body["data"][0]["id"] == "tiny"
    assert body["data"][0]["max_model_len"] == 512
    assert (await deployment.client.get("/v1/models/tiny")).json() == body["data"][0]


async def test_tokenize_and_back(deployment: Deployment) -> None:
    for text in ("the quick brown fox", "", "🙂\0\ufffd", "<|im_start|>"):
        body = {"model": "tiny", "prompt": text, "add_special_tokens": False}
        told = (await deployment.client.post("/tokenize", json=body)).json()
        expected = list(TOKENIZER.encode(text, add_special_tokens=False))
        assert told["tokens"] == expected
        assert told["count"] == len(expected)
        assert told["max_model_len"] == 512
        back = await deployment.client.post("/detokenize", json={"tokens": told["tokens"]})
        assert back.json() == {"prompt": text}


async def test_tokenize_a_conversation_as_it_would_be_generated(deployment: Deployment) -> None:
    messages = [{"role": "user", "content": "hi"}]
    told = await deployment.client.post("/tokenize", json={"messages": messages})
    await deployment.chat("hi")
    assert tuple(told.json()["tokens"]) == deployment.verifier.submitted[-1].prompt_ids


async def test_tokenize_names_the_field_at_fault(deployment: Deployment) -> None:
    for path, body, status, param in (
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "model": "other"}, 404, "model"),
        ("/detokenize", {"tokens": ["x"]}, 400, "tokens[0]"),
        ("/detokenize", {}, 400, "tokens"),
    ):
        response = await deployment.client.post(path, json=body)
        assert response.status_code == status
        assert response.json()["error"]["param"] == param


async def test_tokenizer_info(deployment: Deployment) -> None:
    assert (await deployment.client.get("/tokenizer_info")).json() == {
        "eos_token": "<|im_end|>",
        "bos_token": "<|im_start|>",
        "pad_token": "<|endoftext|>",
        "chat_template": CHAT_TEMPLATE,
    }


async def test_status_for_people_and_machines(deployment: Deployment) -> None:
    page = await deployment.client.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "127.0.0.1" in page.text
    for path in ("/health", "/v1/models", "/server_info", "/"):
        assert (await deployment.client.head(path)).status_code == 200
    assert (await deployment.client.get("/docs")).status_code == 200
    described = (await deployment.client.get("/openapi.json")).json()
    body = described["paths"]["/v1/chat/completions"]["post"]["requestBody"]
    fields = body["content"]["application/json"]["schema"]["properties"]
    assert "speculation" in fields


async def test_the_cluster_report_names_every_member(deployment: Deployment) -> None:
    report = (await deployment.client.get("/v1/cluster")).json()
    told = {"mode", "reason", "since_s", "acceptance_per_position"}
    assert report.keys() == told | {"routers", "verifiers", "drafters"}
    (verifier,) = report["verifiers"]
    member = deployment.verifier.member
    assert (verifier["replica_id"], verifier["address"]) == (member.replica_id, member.address)
    assert verifier["kv_blocks_total"] == 64
    assert verifier["prefix_cache_hit_rate"] is None, "nothing was looked up"


async def test_the_cluster_report_tells_what_the_cache_is_worth(deployment: Deployment) -> None:
    deployment.verifier.load = VerifierLoad(
        prefix_cache_hit_tokens=1, prefix_cache_query_tokens=3, num_preemptions=7
    )

    def told() -> bool:
        load = deployment.service.pool.load()
        return any(aged.value.num_preemptions for aged in load.verifiers.values())

    await eventually(told)
    (verifier,) = (await deployment.client.get("/v1/cluster")).json()["verifiers"]
    assert (verifier["prefix_cache_hit_rate"], verifier["num_preemptions"]) == (0.3333, 7)
