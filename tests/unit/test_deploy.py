"""The recipes are held to what reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from splitserve.settings import read_config_file, resolve

DEPLOY = Path(__file__).parents[2] / "deploy"


def test_our_config_resolves() -> None:
    settings = resolve({}, file=read_config_file(DEPLOY / "splitserve.yaml"), environ={})
    assert (settings.model, settings.port) == ("smollm2-135m", 8000)
    assert settings.prefill.num_workers == settings.decode.num_workers == 1


def test_ray_accepts_the_cluster_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    util = pytest.importorskip("ray.autoscaler._private.util")
    monkeypatch.chdir(DEPLOY.parent)  # file_mounts are relative to where `ray up` is run
    content = yaml.safe_load((DEPLOY / "ray-cluster.yaml").read_text())
    util.validate_config(util.prepare_config(content))
    for source in content["file_mounts"].values():
        assert Path(source).exists()


def test_kubernetes_recipe_carries_a_config_that_resolves() -> None:
    documents: list[dict[str, Any]] = list(
        yaml.safe_load_all((DEPLOY / "kuberay.yaml").read_text())
    )
    by_kind = {document["kind"]: document for document in documents}
    assert {"ConfigMap", "RayCluster", "RayJob", "Service"} <= set(by_kind)
    file = yaml.safe_load(by_kind["ConfigMap"]["data"]["splitserve.yaml"])
    settings = resolve({}, file=file, environ={"SPLITSERVE_API_KEY": "from-a-secret"})
    groups = {group["groupName"] for group in by_kind["RayCluster"]["spec"]["workerGroupSpecs"]}
    assert groups == {"prefill", "decode"}
    assert settings.prefill.resources == {"prefill": 1}


def test_no_pod_waits_for_what_the_job_starts() -> None:
    """A job is started on a cluster whose pods are ready; HTTP is up only when it has run."""
    (cluster,) = [
        document
        for document in yaml.safe_load_all((DEPLOY / "kuberay.yaml").read_text())
        if document["kind"] == "RayCluster"
    ]
    spec = cluster["spec"]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        for container in group["template"]["spec"]["containers"]:
            assert not {"readinessProbe", "startupProbe", "livenessProbe"} & container.keys()
