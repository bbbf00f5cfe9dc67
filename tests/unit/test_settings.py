from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from splitserve.config import MAX_WORKERS, ROLES, CoordinatorConfig, EngineConfig, Liveness
from splitserve.errors import ConfigError
from splitserve.flags import all_flags
from splitserve.launch.plan import LaunchPlan
from splitserve.settings import RaySettings, ServeSettings, read_config_file, resolve, resolve_ray


def settings_of(
    file: dict[str, Any] | None = None, environ: dict[str, str] | None = None, **given: Any
) -> ServeSettings:
    return resolve({"model": "m", **given}, file=file, environ=environ or {})


def test_defaults_are_those_of_the_configs_and_of_the_interface() -> None:
    settings = settings_of()
    assert (settings.prefill.num_workers, settings.decode.num_workers) == (1, 1)
    assert (settings.host, settings.port, settings.max_queue) == ("127.0.0.1", 8000, 256)
    assert settings.served_model_names == ("m",)
    assert settings.api_keys == ()
    assert settings.prefill.engine == settings.decode.engine == EngineConfig(model="m")
    assert settings.liveness == Liveness(0.5, 3.0, 10.0)
    assert settings.request_timeout_s == 600.0
    assert settings.router == CoordinatorConfig("d", "m", ("m",)).router
    engine = settings.decode.engine
    assert (engine.block_size, engine.max_num_seqs, engine.gpu_memory_utilization) == (16, 64, 0.9)


def test_order_is_flag_environment_file_default() -> None:
    file = {"engine": {"max_num_seqs": 1, "block_size": 8}, "port": 1}
    environ = {"SPLITSERVE_MAX_NUM_SEQS": "2", "SPLITSERVE_PORT": "2"}
    settings = settings_of(file, environ, port=3)
    assert settings.port == 3
    assert settings.decode.engine.max_num_seqs == 2
    assert settings.decode.engine.block_size == 8
    assert settings.decode.engine.dtype == "auto"


@pytest.mark.parametrize("role", ROLES)
def test_a_pool_has_every_engine_setting_of_its_own(role: str) -> None:
    other = "decode" if role == "prefill" else "prefill"
    given: dict[str, Any] = {f"{role}_num_blocks": 12}
    settings = settings_of(num_blocks=100, **given)
    assert getattr(settings, role).engine.num_blocks == 12
    assert getattr(settings, other).engine.num_blocks == 100
    from_file = settings_of({role: {"num_blocks": 12}, "engine": {"num_blocks": 100}})
    from_environ = settings_of(
        None,
        {f"SPLITSERVE_{role.upper()}_NUM_BLOCKS": "12", "SPLITSERVE_NUM_BLOCKS": "100"},
    )
    for same in (from_file, from_environ):
        assert (same.prefill, same.decode) == (settings.prefill, settings.decode)


# The same setting for the cluster and for one pool, each in another place; the last one counts.
_IN_FILE = {"engine": {"num_blocks": 1}, "decode": {"num_blocks": 2}}
_IN_ENVIRON = {"SPLITSERVE_NUM_BLOCKS": "3", "SPLITSERVE_DECODE_NUM_BLOCKS": "4"}
_IN_FLAGS = {"num_blocks": 5, "decode_num_blocks": 6}


@pytest.mark.parametrize(
    ("file", "environ", "given", "prefill", "decode"),
    [
        (_IN_FILE, {}, {}, 1, 2),
        (_IN_FILE, {"SPLITSERVE_NUM_BLOCKS": "3"}, {}, 3, 3),
        (_IN_FILE, {"SPLITSERVE_DECODE_NUM_BLOCKS": "4"}, {}, 1, 4),
        (_IN_FILE, _IN_ENVIRON, {}, 3, 4),
        (_IN_FILE, _IN_ENVIRON, {"num_blocks": 5}, 5, 5),
        (_IN_FILE, _IN_ENVIRON, {"decode_num_blocks": 6}, 3, 6),
        (_IN_FILE, _IN_ENVIRON, _IN_FLAGS, 5, 6),
    ],
)
def test_a_higher_source_beats_a_pools_own_value(
    file: dict[str, Any],
    environ: dict[str, str],
    given: dict[str, Any],
    prefill: int,
    decode: int,
) -> None:
    settings = settings_of(file, environ, **given)
    assert settings.prefill.engine.num_blocks == prefill
    assert settings.decode.engine.num_blocks == decode
    assert resolve({}, file=settings.document, environ={}) == settings


def test_liveness_is_told_to_the_coordinator_and_the_workers() -> None:
    settings = settings_of(heartbeat_timeout_s=5, max_step_s=300)
    assert settings.liveness == Liveness(0.5, 5.0, 10.0, max_step_s=300.0)
    plan = LaunchPlan(settings, "/models/m", cores=())
    assert plan.coordinator().liveness == settings.liveness


def test_a_pool_may_have_as_many_workers_as_it_can_be_scaled_to() -> None:
    assert settings_of(prefill=MAX_WORKERS).prefill.num_workers == MAX_WORKERS
    with pytest.raises(ConfigError, match=f"above the greatest value {MAX_WORKERS}"):
        settings_of(prefill=MAX_WORKERS + 1)


def test_where_a_cluster_on_ray_is_needs_nothing_else_to_be_right() -> None:
    file = {"host": "0.0.0.0", "engin": {}, "ray": {"address": "here:1", "namespace": "file"}}
    environ = {"SPLITSERVE_PORT": "x", "SPLITSERVE_RAY_NAMESPACE": "environment"}
    found = resolve_ray({"ray_name": "mine", "ray_address": None}, file=file, environ=environ)
    assert found == RaySettings("here:1", "environment", "mine", 120.0)
    assert resolve_ray({}, environ={}) == settings_of().ray
    with pytest.raises(ConfigError, match=r"did you mean 'ray\.name"):
        resolve_ray({}, file={"ray": {"nam": "x"}}, environ={})


def test_every_flag_has_a_variable_and_a_place_in_the_file() -> None:
    paths = [flag.path for flag in all_flags().values()]
    assert len(set(paths)) == len(paths)
    for flag in all_flags().values():
        assert flag.option == "--" + flag.key.replace("_", "-")
        assert flag.variable == "SPLITSERVE_" + flag.key.upper()


def test_the_printed_document_says_the_same_when_read_back() -> None:
    settings = settings_of(
        prefill=2,
        decode_num_blocks=12,
        kv_cache_memory_bytes="1.5GiB",
        prefill_devices="0,1",
        served_model_name=["a", "b"],
    )
    assert resolve({}, file=settings.document, environ={}) == settings


def test_triton_is_for_pools_with_gpus() -> None:
    given: dict[str, Any] = {"attention_backend": "triton", "decode_devices": "1"}
    assert settings_of(prefill=0, **given).decode.devices == (1,)
    assert settings_of(prefill_devices="0", **given).prefill.engine.attention_backend == "triton"
    on_ray = settings_of({"decode": {"num_gpus": 0.5}}, prefill=0, attention_backend="triton")
    assert on_ray.decode.engine.attention_backend == "triton"


def test_client_keys_are_not_printed() -> None:
    settings = settings_of(api_key=["secret-1", "secret-2"])
    assert settings.api_keys == ("secret-1", "secret-2")
    assert "secret" not in str(settings.document)


def test_pool_given_as_a_number() -> None:
    settings = settings_of({"prefill": 0, "decode": 3})
    assert (settings.prefill.num_workers, settings.decode.num_workers) == (0, 3)


@pytest.mark.parametrize(
    ("said", "expected"),
    [("512MiB", 512 << 20), ("1k", 1000), ("2GiB", 2 << 30), (7, 7), ("7", 7)],
)
def test_bytes_may_have_a_unit(said: object, expected: int) -> None:
    assert settings_of(kv_cache_memory_bytes=said).decode.engine.kv_cache_memory_bytes == expected


def test_placement_of_a_pool_comes_from_the_file() -> None:
    file = {"decode": {"num_cpus": 0.5, "resources": {"decode": 1}, "label_selector": {"a": "b"}}}
    pool = settings_of(file).decode
    assert (pool.num_cpus, pool.resources, pool.label_selector) == (0.5, {"decode": 1}, {"a": "b"})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_num_seq": 3}, "unknown setting 'max_num_seq'; did you mean 'max_num_seqs'?"),
        ({"decode": 0}, "--decode: 0 is below the least value 1"),
        ({"prefill": -1}, "--prefill: -1 is below the least value 0"),
        ({"port": 65536}, "--port: 65536 is above the greatest value 65535"),
        ({"port": "http"}, "--port: expected a whole number, got 'http'"),
        ({"port": True}, "--port: expected a whole number, got True"),
        ({"block_size": 0}, "--block-size: 0 is below the least value 1"),
        ({"block_size": 8.5}, "--block-size: expected a whole number"),
        ({"gpu_memory_utilization": 1.5}, "above the greatest value 1"),
        ({"request_timeout_s": float("nan")}, "--request-timeout-s: expected a number"),
        ({"dtype": "float23"}, "'float23' is none of auto, float32, .*did you mean 'float32'"),
        ({"kv_cache_memory_bytes": "1 potato"}, "expected a number of bytes"),
        ({"prefill_devices": "0,x"}, "--prefill-devices: expected GPU numbers"),
        ({"transport": "nixl"}, "--transport nixl is not built yet"),
        ({"decode_attention_backend": "triton"}, "triton needs a GPU.* --decode-devices 0"),
        ({"attention_backend": "triton", "decode_devices": "0"}, "needs a GPU.* --prefill-devices"),
        ({"attention_backend": "cpu", "prefill_devices": "0"}, "prefill workers have GPUs"),
        ({"host": "0.0.0.0"}, r"--host 0\.0\.0\.0 .* give an --api-key"),
        ({"host": "example.org"}, "give an --api-key"),
        ({"prefill_block_size": 32}, "block_size must be the same.* prefill has 32, decode 16"),
        (
            {"prefill_dtype": "float32", "decode_dtype": "bfloat16"},
            "dtype must be the same in both pools",
        ),
        ({"heartbeat_timeout_s": 0.6}, "at least twice"),
        ({"model": ""}, "expected a text"),
    ],
)
def test_impossible_settings_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings_of(**given)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ({"engin": {"block_size": 8}}, "unknown key 'engin'"),
        ({"engine": {"blocksize": 8}}, r"'engine.blocksize'.*did you mean 'engine.block_size'"),
        ({"prefill": {"num_worker": 8}}, r"did you mean 'prefill.num_workers'"),
        ({"prefil": {"num_workers": 8}}, r"did you mean 'prefill'"),
        ({"block_size": 8}, r"unknown key 'block_size'.*did you mean 'engine.block_size'"),
        ({"engine": 3}, "engine .config file.: expected a mapping"),
        ({"port": "x"}, r"port \(config file\): expected a whole number"),
        ({"prefill": {"model": "a"}, "decode": {"model": "b"}}, "model must be the same"),
        ({"decode": {"resources": [1]}}, "expected a mapping from names"),
    ],
)
def test_impossible_files_are_refused(file: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve({}, file={"model": "m", **file}, environ={})


def test_unknown_variable_is_refused_and_those_of_others_are_not() -> None:
    with pytest.raises(ConfigError, match="SPLITSERVE_PROT; did you mean 'SPLITSERVE_PORT'"):
        settings_of(None, {"SPLITSERVE_PROT": "1"})
    with pytest.raises(ConfigError, match="SPLITSERVE_PORT: expected a whole number"):
        settings_of(None, {"SPLITSERVE_PORT": "x"})
    settings_of(None, {"SPLITSERVE_BASE_URL": "http://x", "PORT": "x", "SPLITSERVE_PORT": ""})


def test_no_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="no model"):
        resolve({}, environ={})


def test_off_loopback_with_a_key_is_fine() -> None:
    assert settings_of(host="0.0.0.0", api_key="k").api_keys == ("k",)
    for host in ("127.0.0.2", "::1", "localhost"):
        assert settings_of(host=host).host == host


def test_mixed_sizes_are_fine_where_they_may_differ() -> None:
    settings = settings_of(
        prefill_max_model_len=512, decode_max_model_len=1024, prefill_dtype="auto"
    )
    assert settings.prefill.engine.max_model_len == 512
    aggregated = settings_of(prefill=0, prefill_block_size=32)
    assert aggregated.decode.engine.block_size == 16


def test_files_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    with pytest.raises(ConfigError, match="can't read the config file"):
        read_config_file(path)
    for text, message in (("- a\n", "expected a mapping"), ("a: [", "can't read")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            read_config_file(path)
    path.write_text("")
    assert read_config_file(path) == {}
