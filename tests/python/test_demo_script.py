"""scripts/demo.py: which devices it takes, and which earlier profile it goes on with."""

import importlib.util
import json

import pytest


@pytest.fixture
def demo(tree):
    spec = importlib.util.spec_from_file_location("demo", tree / "scripts" / "demo.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_profile_that_other_work_disturbed_is_not_kept(demo, tmp_path):
    profile = tmp_path / "gpu_profiles.json"
    assert not demo.measured_in_quiet(profile)
    for text in ["", "{", "[]", "{}", '{"devices": 3}', '{"devices": []}', '{"devices": [3]}']:
        profile.write_text(text)
        assert not demo.measured_in_quiet(profile), text
    calm, busy = {"name": "cpu:0", "disturbed": False}, {"name": "cpu:1", "disturbed": True}
    profile.write_text(json.dumps({"devices": [calm, calm]}))
    assert demo.measured_in_quiet(profile)
    profile.write_text(json.dumps({"devices": [calm, busy]}))
    assert not demo.measured_in_quiet(profile)


def test_unequal_devices_are_used_and_equal_ones_are_made_unequal(demo):
    cpu = {"kind": "cpu", "name": "cpu:0", "model": "AMD EPYC"}
    old, new = ({"kind": "cuda", "name": f"cuda:{i}", "model": model} for i, model in enumerate(["T4", "H200"]))
    assert demo.choose([cpu, old, new], True)[0] == ["--devices", "cuda:0,cuda:1"]
    assert demo.choose([cpu, old], True)[0] == ["--devices", "cuda:0,cpu"]
    options, words = demo.choose([cpu, cpu], True)
    assert options == ["-n", "2", "--cpu-quota", "1:0.25"]
    assert "made" in words and "quota" in words
    options, words = demo.choose([cpu], False)
    assert options == ["-n", "2"] and "share the CPU" in words
