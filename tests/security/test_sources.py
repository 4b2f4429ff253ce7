"""Static checks of the sources: no code from data files is executed, and few files read or write weights."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]


FORBIDDEN = {
    "eval": "runs text", "exec": "runs text", "__import__": "imports by name", "os.system": "is a shell",
    "os.popen": "is a shell", "pickle.load": "runs code", "pickle.loads": "runs code", "pickle.Unpickler": "runs code",
    "yaml.unsafe_load": "runs code", "yaml.full_load": "makes objects", "torch.hub.load": "runs code",
    "tarfile.open": "may write anywhere", "shutil.unpack_archive": "may write anywhere",
}  # fmt: skip
REQUIRED = {"torch.load": ("weights_only", True), "np.load": ("allow_pickle", False)}
# A small file can keep torch.load busy forever. env.py only reads data that fastamp has just written.
READERS = ("fastamp/checkpoint/weights_file.py", "fastamp/utils/env.py")
ALLOWED = {
    "projects/FastTune/autotuner/algorithms.py": "__import__",  # of constant names
    "fastamp/config/component_keys.py": "eval",  # of statements in the sources of this package
    "fastamp/fastreid/script.py": "exec",  # of the script that the user asks to run
}


def unsafe_calls(path):
    """Yield the calls in a source file that could execute code from a data file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        name, words = ast.unparse(node.func), {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        if name in FORBIDDEN:
            yield f"{path}:{node.lineno}: {name} {FORBIDDEN[name]}"
        if name in REQUIRED and words.get(REQUIRED[name][0]) != str(REQUIRED[name][1]):
            yield f"{path}:{node.lineno}: {name} without {REQUIRED[name][0]}={REQUIRED[name][1]}"
        if name.endswith("load_state_dict_from_url"):
            yield f"{path}:{node.lineno}: {name} does not check the file, which read_checkpoint does"
        if words.get("shell", "False") != "False":
            yield f"{path}:{node.lineno}: {name} with a shell"
        if name == "yaml.load" and words.get("Loader") not in ("_Loader", "yaml.SafeLoader"):
            yield f"{path}:{node.lineno}: yaml.load without a safe loader"
        if name.endswith((".extractall", ".extract")):
            yield f"{path}:{node.lineno}: {name} may write anywhere"


def test_sources_contain_no_calls_that_execute_code_from_data():
    sources = [path for folder in ("fastamp", "tools", "projects") for path in (ROOT / folder).rglob("*.py")]
    assert len(sources) > 100
    found = [call for path in sources for call in unsafe_calls(path)]
    allowed = [(f"{ROOT / path}:", f" {name} ") for path, name in ALLOWED.items()]
    left = [call for call in found if not any(call.startswith(path) and name in call for path, name in allowed)]
    assert [call for call in left if "tools/benchmark" not in call] == []


def test_torch_load_is_called_only_in_allowed_files():
    sources = [path for folder in ("fastamp", "tools", "projects") for path in (ROOT / folder).rglob("*.py")]
    found = {str(path.relative_to(ROOT)) for path in sources if "torch.load(" in path.read_text(encoding="utf-8")}
    assert found == set(READERS)


# env.py serializes random states to bytes; only fastamp/checkpoint reads and writes weights files.
WEIGHTS = {"torch.save", "torch.load", "safetensors", "load_state_dict_from_url", "torch.serialization"}
NO_WEIGHTS = ("fastamp/utils/env.py",)


def weights_calls(path):
    """Yield the calls and imports in a source file that read or write weights files."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            if any(
                name == weight or name.startswith(f"{weight}.") or name.endswith(f".{weight}") for weight in WEIGHTS
            ):
                yield f"{path}:{node.lineno}: {name}"


def test_only_the_checkpoint_package_reads_and_writes_weights():
    sources = [path for folder in ("fastamp", "tools", "projects") for path in (ROOT / folder).rglob("*.py")]
    allowed = [ROOT / path for path in NO_WEIGHTS]
    left = [path for path in sources if ROOT / "fastamp/checkpoint" not in path.parents and path not in allowed]
    assert [call for path in left for call in weights_calls(path)] == []
    assert any(True for path in sources if path not in left for _ in weights_calls(path))


def test_weights_access_check_finds_planted_calls(tmp_path):
    source = tmp_path / "a.py"
    source.write_text(
        "import safetensors.torch\nfrom torch import save\nfrom torch.hub import load_state_dict_from_url\n"
        "torch.save(state, p)\nread = torch.load\nread_checkpoint(p)\ntorch.jit.save(m, p)\nnp.load(p)\n"
    )
    assert sorted(call.split(":")[1] for call in weights_calls(source)) == ["1", "2", "3", "4", "5"]


def test_unsafe_call_check_finds_planted_calls(tmp_path):
    source = tmp_path / "a.py"
    source.write_text(
        "torch.load(p)\ntorch.load(p, weights_only=False)\nnp.load(p)\nyaml.load(t)\nyaml.load(t, Loader=yaml.Loader)\n"
        "subprocess.run(c, shell=True)\nos.system(c)\neval(t)\npickle.loads(b)\narchive.extractall(f)\n"
        "torch.load(p, weights_only=True)\nmodel.eval()\nyaml.load(t, Loader=yaml.SafeLoader)\n"
    )
    assert len(list(unsafe_calls(source))) == 10
