"""What is wrong with a Ray Serve config of ours, found without a Ray cluster.

Serve ignores keys that it does not know at several levels, so that a typo is a setting that
silently does not apply. Here each key is looked up in the model of its level.
"""

from __future__ import annotations

import importlib
import inspect
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError
from ray.serve import Application
from ray.serve.schema import ServeDeploySchema

from cluster.config import RouterConfig

DEPLOYMENTS = {"router": "Router", "verifier": "Verifier", "drafter": "Drafter"}
"""Public names, by application."""


def problems(config: Mapping[str, Any]) -> list[str]:
    """Everything that is wrong, each with the path of the key."""
    found = list(_mismatches(config, ServeDeploySchema, ""))
    for index, application in enumerate(config.get("applications", ())):
        path = f"applications[{index}]"
        found += [f"{path}.{problem}" for problem in _application_problems(application)]
    return found


# --- keys and values ----------------------------------------------------------------------------


def _mismatches(value: Any, model: type[BaseModel], path: str) -> Iterator[str]:
    """Unknown keys, here and below, and what the model itself refuses."""
    if not isinstance(value, Mapping):
        yield f"{path}: must be a mapping"
        return
    for key, below in value.items():
        field = model.model_fields.get(key)
        here = f"{path}.{key}".removeprefix(".")
        if field is None:
            yield f"{here}: unknown key"
            continue
        for nested in _models_in(field.annotation):
            for index, item in enumerate(below if isinstance(below, list) else [below]):
                if item is not None:
                    where = f"{here}[{index}]" if isinstance(below, list) else here
                    yield from _mismatches(item, nested, where)
    try:
        model.model_validate(value)
    except (ValidationError, ImportError, AttributeError) as error:
        yield f"{path or 'config'}: {error}"


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Pydantic models that a field's annotation names, in whatever union or list."""
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from _models_in(argument)


# --- one application ----------------------------------------------------------------------------


def _application_problems(application: Mapping[str, Any]) -> Iterator[str]:
    try:
        built = _build(application)
    except (ImportError, AttributeError, ValueError) as error:
        yield f"import_path: {error}"
        return
    except ArgsError as error:
        yield f"args: {error}"
        return
    deployment = built._bound_deployment  # Serve has no public way to ask an Application.
    expected = DEPLOYMENTS.get(application.get("name", ""))
    if deployment.name != expected:
        yield f"name: this application's deployment is {deployment.name}, not {expected}"
    for index, options in enumerate(application.get("deployments", ())):
        for problem in _deployment_problems(options, deployment):
            yield f"deployments[{index}].{problem}"


class ArgsError(Exception):
    """The application's own configuration refuses its args."""


def _build(application: Mapping[str, Any]) -> Application:
    module, _, name = str(application.get("import_path")).partition(":")
    if name != "build":
        raise ValueError("must end in :build")
    build = getattr(importlib.import_module(module), name)
    try:
        return build(application.get("args", {}))
    except ValidationError as error:
        raise ArgsError(error) from error


def _deployment_problems(options: Mapping[str, Any], deployment: Any) -> Iterator[str]:
    if options.get("name") != deployment.name:
        yield f"name: {options.get('name')} is no deployment of this application"
    config = deployment.init_args[0]
    timeout_s = options.get(
        "graceful_shutdown_timeout_s", deployment._deployment_config.graceful_shutdown_timeout_s
    )
    if timeout_s <= getattr(config, "drain_grace_s", 0):
        yield f"graceful_shutdown_timeout_s: {timeout_s:g} is not over the args' drain_grace_s"
    yield from _autoscaling_problems(options.get("autoscaling_config") or {})
    if "user_config" in options:
        yield from _user_config_problems(options["user_config"], config)


def _autoscaling_problems(scaling: Mapping[str, Any]) -> Iterator[str]:
    for name in ("upscale_delay_s", "downscale_delay_s"):
        if name in scaling and scaling[name] < scaling.get("look_back_period_s", 30):
            yield f"autoscaling_config.{name}: is below look_back_period_s"


def _user_config_problems(user_config: Mapping[str, Any], config: BaseModel) -> Iterator[str]:
    if not isinstance(config, RouterConfig):
        yield "user_config: this deployment takes none"
        return
    try:  # As RouterReplica.reconfigure does.
        RouterConfig.model_validate({**config.model_dump(), **user_config})
    except ValidationError as error:
        yield f"user_config: {error}"
