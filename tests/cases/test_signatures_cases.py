"Signed checkpoints: what is refused, and what the refusal says."

import shutil
import subprocess

import pytest
from torch import nn

from llm_from_scratch.checkpointing import latest_checkpoint, load_checkpoint, main, save_checkpoint, verify_checkpoint
from llm_from_scratch.env import UserError
from llm_from_scratch.signatures import check_signature, make_keys, read_key

pytest.importorskip("cryptography")


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    return make_keys(tmp_path_factory.mktemp("keys") / "run.pem")


@pytest.fixture
def signed(tmp_path, keys):
    return save_checkpoint(tmp_path, {"model": nn.Linear(2, 2)}, step=1, signing_key=keys[0])


def test_a_signed_checkpoint_loads_with_and_without_asking(signed, keys):
    load_checkpoint(signed, {"model": nn.Linear(2, 2)})
    load_checkpoint(signed, {"model": nn.Linear(2, 2)}, public_key=keys[1])


def test_an_unsigned_one_is_refused_and_passed_over(signed, keys):
    unsigned = save_checkpoint(signed.parent, {"model": nn.Linear(2, 2)}, step=2)
    with pytest.raises(UserError, match="step_00000002 is refused: it is not signed"):
        load_checkpoint(unsigned, {"model": nn.Linear(2, 2)}, public_key=keys[1])
    assert latest_checkpoint(signed.parent, public_key=keys[1]) == signed


def test_a_signature_of_another_key_names_the_key_that_was_wanted(signed, keys, tmp_path):
    other = make_keys(tmp_path / "other.pem")[1]
    [problem] = check_signature(signed, other)
    assert str(other) in problem and "another key" in problem


def test_weights_exchanged_with_a_fitting_manifest_are_refused(signed, keys, tmp_path):
    evil = save_checkpoint(tmp_path / "evil", {"model": nn.Linear(2, 2)}, step=1)
    shutil.copy(signed / "manifest.sig", evil)
    assert verify_checkpoint(evil) == []
    assert "changed since" in verify_checkpoint(evil, public_key=keys[1])[0]


@pytest.mark.parametrize("text", ["", "nothing", "-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n"])
def test_a_file_that_is_no_key_is_named(tmp_path, text):
    (tmp_path / "key.pem").write_text(text)
    for private in (True, False):
        with pytest.raises(UserError, match="key.pem"):
            read_key(tmp_path / "key.pem", private=private)


def test_a_wrong_key_stops_the_save_and_leaves_nothing(tmp_path, keys):
    with pytest.raises(UserError, match="run.public.pem is not a private key"):
        save_checkpoint(tmp_path / "run", {"model": nn.Linear(2, 2)}, step=1, signing_key=keys[1])
    assert list((tmp_path / "run").iterdir()) == []


def test_the_command_makes_keys_and_checks_with_them(tmp_path, signed, keys, capsys):
    assert main(["keygen", str(tmp_path / "new.pem")]) == 0
    assert "--checkpoint.signing-key" in capsys.readouterr().out
    assert main(["verify", str(signed), "--public-key", str(keys[1])]) == 0
    assert main(["verify", str(signed), "--public-key", str(tmp_path / "new.public.pem")]) == 1
    with pytest.raises(UserError, match="exists"):
        main(["keygen", str(tmp_path / "new.pem")])


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not here")
def test_openssl_agrees(signed, keys):
    command = ["openssl", "pkeyutl", "-verify", "-pubin", "-inkey", keys[1], "-rawin", "-in", signed / "manifest.json", "-sigfile", signed / "manifest.sig"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0 and "Verified Successfully" in done.stdout, done.stderr
