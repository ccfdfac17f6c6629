"""What a newcomer gets wrong, by command: the error names what it was and what to do, before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from agentserve.checkpoint.folder import CheckpointExistsError, CheckpointFolderError, make_folder
from agentserve.cli import main

CASES = [
    (["lanch"], 2, "Did you mean 'launch'?"),
    # launch
    (["launch"], 2, "Missing argument 'RECIPE'"),
    (["launch", "tiny_cpu"], 2, "did you mean 'tiny-cpu'?"),
    (["launch", "tiny-cpu", "--model", "FULL"], 2, "it is not a checkpoint folder; pass another one with --model"),
    (["launch", "tiny-cpu", "--port", "99999"], 2, "--port, field 'port': input should be less than or equal to 65535"),
    (["launch", "tiny-cpu", "--index-reuse", "every:4"], 2, "--index-reuse, field 'index_reuse'"),
    (["launch", "tiny-cpu", "--kv-events", "udp://x"], 2, "'udp://x' is no ZMQ endpoint; write tcp://*:PORT"),
    (["launch", "tiny-cpu", "--timeout", "0"], 2, "Invalid value for '--timeout'"),
    (["launch", "tiny-cpu", "--eagle3", "FULL", "--synthetic-acceptance", "much"], 2, "or golden; got 'much'"),
    (["launch", "tiny-cpu", "--set", "kv.bogus=1"], 2, "field 'kv.bogus': unknown field; known here: capacity_tokens"),
    # replay
    (["replay", "TRACE"], 2, "give a TRACE and --out RUN, or --resume RUN"),
    (["replay", "NOTHING", "--out", "RUN"], 1, "no such file or directory; check the path"),
    (["replay", "FULL/file", "--out", "RUN"], 1, "format not recognised; name one of"),
    (["replay", "TRACE", "--out", "RUN", "--vocab", "5:3"], 2, "Error: --vocab: vocab must be LO:HI"),
    (["replay", "TRACE", "--out", "RUN", "--think", "slow"], 2, "Error: --think: think time 'slow'"),
    (["replay", "TRACE", "--out", "RUN", "--client", "openai", "--vocab", "5:30"], 2, "Error: vocab is for the sglang"),
    (["replay", "TRACE", "--out", "FULL"], 1, "choose another --out"),
    (["replay", "TRACE", "--out", "RUN", "--url", "http://127.0.0.1:9"], 1, "or give its address with --url"),
    # checkpoint
    (["checkpoint", "tiny"], 2, "Missing argument 'FOLDER'"),
    (["checkpoint", "tiny", "FULL"], 1, "pass --overwrite to replace it or name another folder"),
    (["checkpoint", "tiny", "FULL", "--overwrite"], 1, "holds files that are no checkpoint; name another folder"),
    (["checkpoint", "tiny-eagle3", "FULL/file/m3"], 1, "cannot be made (Not a directory); name a folder that can be"),
    (["checkpoint", "tiny", "NEW", "--layers", "1"], 2, "Invalid value for '--layers'"),
    # shapes
    (["shapes", "nope"], 2, "shipped recipe (m3-h200, m3-mi355x, tiny-cpu)"),
    (["shapes", "m3-h200", "--tp", "3"], 2, "choose a tp that divides it"),
    (["shapes", "m3-h200", "--fraction", "2"], 2, "Invalid value for '--fraction'"),
    (["shapes", "m3-h200", "--eagle3", "NEW"], 2, "agentserve checkpoint tiny-eagle3 NEW`, or pass --eagle3 FOLDER"),
    (["shapes", "m3-h200", "--set", "tp"], 2, "write it as field=value"),
    # demo
    (["demo", "--sessions", "0"], 2, "Invalid value for '--sessions'"),
    (["demo", "--trace", "NOTHING"], 2, "does not exist"),
    (["demo", "--trace", "FULL/file"], 1, "--trace: FULL/file: format not recognised"),
    (["demo", "--checkpoint", "FULL"], 1, "--checkpoint: FULL holds files that are no checkpoint"),
    (["demo", "--checkpoint", "FULL/file/m3"], 1, "--checkpoint: FULL/file/m3 cannot be made"),
]


@pytest.mark.parametrize(("arguments", "code", "message"), CASES, ids=[" ".join(case[0]) for case in CASES])
def test_bad_input_is_told_what_to_do(
    arguments: list[str], code: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("FULL").mkdir()
    Path("FULL/file").write_text("of somebody else\n")
    arguments = ["generated:preset=tiny,sessions=2,seed=1" if word == "TRACE" else word for word in arguments]
    result = CliRunner().invoke(main, arguments)
    told = " ".join(result.output.split())
    assert (result.exit_code, message in told) == (code, True), told
    assert "Traceback" not in told
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["FULL", "file"]  # nothing was begun
    assert Path("FULL/file").read_text() == "of somebody else\n"


def test_a_checkpoint_replaces_a_checkpoint_whole_or_half_written(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "m3"
    make_folder(folder, overwrite=False)
    make_folder(folder, overwrite=False)  # empty
    (folder / "model-00001-of-00001.safetensors").touch()
    make_folder(folder, overwrite=True)
    with pytest.raises(CheckpointExistsError, match="--overwrite"):
        make_folder(folder, overwrite=False)
    (folder / "model-00001-of-00001.safetensors").rename(folder / "thesis.txt")
    with pytest.raises(CheckpointFolderError, match="no checkpoint"):
        make_folder(folder, overwrite=True)
