"NCCL settings by profile: what the user has set wins, what is set in vain is told."

import os
import subprocess
import sys

import pytest

from llm_from_scratch.config import EngineConfig
from llm_from_scratch.env import UserError
from llm_from_scratch.links import COMMON, MISLEADING, PROFILES, YOURS, apply_links, check_links, choose_settings, misleading_names


def test_the_configuration_knows_every_profile():
    assert set(EngineConfig.model_fields["links"].annotation.__args__) == {"none", *PROFILES}


@pytest.mark.parametrize("profile", PROFILES)
def test_every_setting_has_its_reason_its_price_and_its_source(profile):
    for setting in PROFILES[profile] + COMMON + YOURS:
        assert setting.does and setting.harms and setting.source.startswith("https://docs.")
        assert setting.name.startswith(("NCCL_", "TORCH_")) and setting.name not in MISLEADING


@pytest.mark.parametrize("profile", PROFILES)
def test_what_the_user_has_set_wins_and_is_shown(profile):
    first = PROFILES[profile][0].name
    environ = {first: "mine", "HOME": "here"}
    lines = apply_links(profile, environ)
    assert environ[first] == "mine" and f"{first}=mine (yours)" in lines[0]
    assert {setting.name: setting.value for setting in PROFILES[profile][1:] + COMMON}.items() <= environ.items()
    assert all(choice.yours for choice in choose_settings(profile, environ))


def test_none_sets_nothing_and_an_unknown_profile_is_named():
    environ = {}
    assert apply_links("none", environ) == [] and environ == {}
    with pytest.raises(UserError, match="'ethernet' is unknown; take none, workstation, nvlink"):
        apply_links("ethernet", environ)


def test_the_much_quoted_timeout_is_told_to_be_no_setting():
    (line,) = misleading_names({"NCCL_SOCKET_TIMEOUT": "1800000"})
    assert "NCCL_SOCKET_TIMEOUT is read by nobody" in line and "init_process_group(timeout=...)" in line and "engine.timeout_seconds" in line


@pytest.mark.parametrize("threads, sockets, is_told", [("16", "4", False), ("16", "5", True), ("x", "99", False)])
def test_too_many_sockets_are_told(threads, sockets, is_told):
    assert bool(misleading_names({"NCCL_SOCKET_NTHREADS": threads, "NCCL_NSOCKS_PERTHREAD": sockets})) == is_told


def test_a_profile_without_its_card_is_told():
    assert not check_links("infiniband", "workstation").ok and not check_links("workstation", "infiniband").ok
    assert check_links("none", "infiniband").ok and check_links("nvlink", "workstation").ok


def test_the_workstation_profile_on_nvlink_is_told():
    check = check_links("workstation", "nvlink")
    assert not check.ok and "NCCL_P2P_DISABLE=1" in check.detail
    assert check_links("workstation", "workstation").ok and check_links("nvlink", "nvlink").ok


@pytest.mark.parametrize("environ, value", [({"TORCH_NCCL_TRACE_BUFFER_SIZE": "9"}, "9"), ({"TORCH_NCCL_TRACE_BUFFER_SIZE": "9", "TORCH_FR_BUFFER_SIZE": "5"}, "5"), ({}, "2000")])
def test_an_old_name_that_torch_still_reads_keeps_its_value(environ, value):
    lines = apply_links("nvlink", environ)
    assert environ["TORCH_FR_BUFFER_SIZE"] == value and (f"TORCH_FR_BUFFER_SIZE={value} (yours)" in lines[0]) == (value != "2000")
    assert any("still read" in line for line in lines) == ("TORCH_NCCL_TRACE_BUFFER_SIZE" in environ)


@pytest.mark.slow
def test_the_command_prints_lines_for_a_shell():
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("NCCL_", "TORCH_"))} | {"NCCL_DEBUG": "INFO"}
    done = subprocess.run([sys.executable, "-m", "llm_from_scratch.links", "workstation", "--export"], env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "export NCCL_P2P_DISABLE=1" in done.stdout.splitlines() and "NCCL_DEBUG" not in done.stdout
