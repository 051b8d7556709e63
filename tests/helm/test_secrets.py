"""Secret material stands in Secrets and nowhere else, and only in pods that need it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import yaml

from cluster.member_auth import Role
from router.api_keys import ApiKeys, KeyFile
from tests.helm.chart import ROLES, Manifest, Rendered, pod_specs

GENERATED = {
    "paceline-api-keys": "admin-key",
    "paceline-member-token": "token",
    "paceline-ray-token": "auth_token",
}


def mounted_secrets(spec: Manifest) -> dict[str, str]:
    """Folder by Secret."""
    mounts = {one["name"]: one for one in spec["containers"][0]["volumeMounts"]}
    return {
        volume["secret"]["secretName"]: mounts[volume["name"]]["mountPath"]
        for volume in spec["volumes"]
        if "secret" in volume
    }


def test_what_is_made_at_random_stands_in_its_secret_alone(defaults: Rendered):
    for name, key in GENERATED.items():
        secret = defaults.named("Secret", name)
        value = secret["stringData"][key]
        assert len(value) == 48
        assert defaults.text.count(value) == 1
        assert secret["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"


def test_the_file_of_keys_is_one_that_a_router_reads(rendering: Callable[..., Rendered], tmp_path):
    more = {"tenant": "search", "sha256": "0" * 64, "max_concurrent_requests": 4}
    secret = rendering({"apiKeys": {"keys": [more]}}).named("Secret", "paceline-api-keys")
    file = tmp_path / "keys.yaml"
    file.write_text(secret["stringData"]["keys.yaml"])
    assert len(KeyFile.model_validate(yaml.safe_load(file.read_text())).keys) == 2
    tenant = ApiKeys(str(file)).authenticate(f"Bearer {secret['stringData']['admin-key']}")
    assert (tenant.name, tenant.admin) == ("admin", True)


def test_secrets_of_the_users_are_taken_and_none_is_made(rendering: Callable[..., Rendered]):
    own = {
        "apiKeys": {"existingSecret": "my-keys"},
        "memberToken": {"existingSecret": "my-members"},
        "rayToken": {"existingSecret": "my-ray"},
        "hubToken": {"existingSecret": "my-hub"},
        "tls": {"enabled": True, "existingSecrets": {role: f"my-{role}" for role in ROLES}},
    }
    rendered = rendering(own)
    assert not rendered.of_kind("Secret")
    assert not rendered.of_kind("Certificate")
    assert not rendered.of_kind("Issuer")
    assert rendered.ray_cluster["authOptions"] == {"mode": "token", "secretName": "my-ray"}
    for role in ROLES:
        mounted = set(mounted_secrets(rendered.pod_templates[role]["spec"]))
        keys = {"my-keys"} if role == "router" else set()
        assert mounted == {"my-members", f"my-{role}"} | keys
        token = next(
            one
            for one in rendered.pod_templates[role]["spec"]["containers"][0]["env"]
            if one["name"] == "HF_TOKEN"
        )
        assert token["valueFrom"]["secretKeyRef"] == {"name": "my-hub", "key": "token"}


def test_each_pod_holds_what_its_role_needs(defaults: Rendered):
    expected = {
        "head": {},
        "router": {
            "paceline-member-token": "/etc/paceline/member-token",
            "paceline-api-keys": "/etc/paceline/api-keys",
        },
        "verifier": {"paceline-member-token": "/etc/paceline/member-token"},
        "drafter": {"paceline-member-token": "/etc/paceline/member-token"},
    }
    for name, template in defaults.pod_templates.items():
        assert mounted_secrets(template["spec"]) == expected[name]


def test_a_router_holds_hashes_of_keys_and_no_key(defaults: Rendered):
    spec = defaults.pod_templates["router"]["spec"]
    (volume,) = (one["secret"] for one in spec["volumes"] if one["name"] == "api-keys")
    assert volume["items"] == [{"key": "keys.yaml", "path": "keys.yaml"}]


def test_secrets_are_mounted_to_be_read(rendered: Rendered):
    for template in rendered.pod_templates.values():
        spec = template["spec"]
        secret = {volume["name"] for volume in spec["volumes"] if "secret" in volume}
        for mount in spec["containers"][0]["volumeMounts"]:
            assert mount.get("readOnly", False) is (mount["name"] in secret)
            assert "subPath" not in mount  # It would never see a renewed certificate or token.


def test_every_secret_that_a_pod_names_is_there_or_the_users(rendered: Rendered):
    made = {one["metadata"]["name"] for one in rendered.of_kind("Secret")}
    made |= {one["spec"]["secretName"] for one in rendered.of_kind("Certificate")}
    for _, spec in pod_specs(rendered):
        for volume in spec.get("volumes", ()):
            assert volume.get("secret", {}).get("secretName") in made | {None}
        for entry in spec["containers"][0]["env"]:
            reference = entry.get("valueFrom", {}).get("secretKeyRef")
            assert reference is None or reference["name"] in made
    assert rendered.ray_cluster["authOptions"]["secretName"] in made


# --- certificates ------------------------------------------------------------------------------


def test_a_certificate_names_its_role_as_members_check_it(rendering: Callable[..., Rendered]):
    rendered = rendering({"tls": {"enabled": True}})
    for role in Role:
        certificate = rendered.named("Certificate", f"paceline-tls-{role}")["spec"]
        assert certificate["dnsNames"] == [role.dns_name]
        assert {"server auth", "client auth"} <= set(certificate["usages"])
        assert certificate["issuerRef"]["name"] == "paceline-ca"
        spec = rendered.pod_templates[role]["spec"]
        assert mounted_secrets(spec)[certificate["secretName"]] == "/etc/paceline/tls"
    authority = rendered.named("Certificate", "paceline-ca")["spec"]
    assert authority["isCA"] is True
    assert authority["issuerRef"]["name"] == "paceline-self-signed"
    assert rendered.named("Issuer", "paceline-self-signed")["spec"] == {"selfSigned": {}}
    assert rendered.named("Issuer", "paceline-ca")["spec"]["ca"]["secretName"] == "paceline-ca"


def test_an_issuer_of_the_users_signs(rendering: Callable[..., Rendered]):
    issuer = {"name": "corporate", "kind": "ClusterIssuer", "group": "cert-manager.io"}
    rendered = rendering({"tls": {"enabled": True, "certManager": {"issuerRef": issuer}}})
    assert not rendered.of_kind("Issuer")
    assert len(rendered.of_kind("Certificate")) == 3
    for certificate in rendered.of_kind("Certificate"):
        assert certificate["spec"]["issuerRef"] == issuer


def test_no_certificate_without_tls(defaults: Rendered):
    assert not defaults.of_kind("Certificate")
    assert "/etc/paceline/tls" not in defaults.text


def test_a_role_that_is_off_needs_no_certificate(rendering: Callable[..., Rendered]):
    off: dict[str, Any] = {
        "tls": {"enabled": True},
        "applications": {"drafter": {"enabled": False}},
        "workerGroups": {"drafter": None},
    }
    names = {one["metadata"]["name"] for one in rendering(off).of_kind("Certificate")}
    assert names == {"paceline-ca", "paceline-tls-router", "paceline-tls-verifier"}


# --- the hub's token and Ray's -----------------------------------------------------------------


def test_rays_token_is_on_by_default(rendered: Rendered):
    assert rendered.ray_cluster["authOptions"]["mode"] == "token"
