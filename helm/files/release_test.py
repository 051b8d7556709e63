"""What `helm test` asks of a release: python -c SCRIPT CHECK, with PACELINE_URL and, where keys are
on, PACELINE_API_KEY in the environment. Ends with a message and 1 if the answer is another one."""

import json
import os
import sys
import urllib.error
import urllib.request

URL = os.environ["PACELINE_URL"]
KEY = os.environ.get("PACELINE_API_KEY")


def ask(path, body=None, key=KEY):
    """Status and text of an answer."""
    headers = {"Content-Type": "application/json"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(URL + path, data=data, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def expect(holds, problem):
    if not holds:
        sys.exit(f"FAILED: {problem}")


def health():
    status, text = ask("/health/ready", key=None)
    expect(status == 200, f"/health/ready answers {status}: {text}")


def completion():
    status, text = ask("/v1/models")
    expect(status == 200, f"/v1/models answers {status}: {text}")
    model = json.loads(text)["data"][0]["id"]
    body = {"model": model, "prompt": "One, two,", "max_tokens": 4, "temperature": 0}
    status, text = ask("/v1/completions", body)
    expect(status == 200, f"/v1/completions answers {status}: {text}")
    reply = json.loads(text)
    expect(reply["usage"]["completion_tokens"] >= 1, f"nothing was generated: {text}")
    expect("speculation" in reply, f"the reply does not say its path: {text}")


def auth():
    for key in (None, "not-a-key"):
        for path in ("/v1/models", "/v1/cluster", "/metrics"):
            status, _ = ask(path, key=key)
            expect(status == 401, f"{path} answers {status} to the key {key}, not 401")


def metrics():
    status, text = ask("/metrics")
    expect(status == 200, f"/metrics answers {status}: {text}")
    for name in ("paceline_path_mode", "paceline_running_sequences"):
        expect(name in text, f"/metrics does not name {name}")


CHECKS = {"health": health, "completion": completion, "auth": auth, "metrics": metrics}

if __name__ == "__main__":
    CHECKS[sys.argv[1]]()
    print(f"{sys.argv[1]}: ok")
