"""Tests of docs/tour.ipynb. It is executed from its text, docs/tour.py, in a fresh kernel without a network, and what it
shows must be what comes out: the same words, about the same numbers, about the same pictures."""
import base64, copy, io, operator, re

import jupytext, nbclient, nbformat, numpy as np, pytest
from PIL import Image, ImageOps

import grpo
from conftest import ROOT

TEXT = jupytext.read(ROOT / "docs/tour.py")
SHIPPED = nbformat.read(ROOT / "docs/tour.ipynb", as_version=4)
CODE = [cell for cell in SHIPPED.cells if cell.cell_type == "code"]
PROSE = [cell.source for cell in SHIPPED.cells if cell.cell_type == "markdown"]
SOLUTION = re.compile(r"<summary>Solution</summary>\n\n```python\n(.*?)```", re.DOTALL)

# --- What the notebook is ---------------------------------------------------------------------------------------
def test_the_notebook_is_made_from_the_text():
    """A sentence that is edited in one of the two would be lost, or not be seen."""
    shipped, text = ([(cell.cell_type, cell.source) for cell in each.cells] for each in (SHIPPED, TEXT))
    assert shipped == text
    assert [cell.execution_count for cell in CODE] == [*range(1, len(CODE) + 1)]
    assert (ROOT / "docs/tour.ipynb").stat().st_size < 1.5e6

@pytest.mark.parametrize("i", range(len(CODE)))
def test_cells_are_short_and_show_what_is_said(i):
    """A cell that only computes would leave a claim to be believed. Some define what later cells use."""
    lines = CODE[i].source.splitlines()
    assert len(lines) <= 15 and max(map(len, lines)) <= 100
    assert CODE[i].outputs or "assert " in CODE[i].source or "def " in CODE[i].source

@pytest.mark.parametrize("i", range(len(CODE)))
def test_no_warning_and_no_path(i):
    """Progress bars, warnings and folders of one machine are noise on all others."""
    for output in CODE[i].outputs:
        assert output.output_type == "display_data" or output.name == "stdout"
        assert not re.search(r"Warning|%\||(/[\w.-]+){2}", output.get("text", "")), output.text

def test_links_hold():
    """A function that is renamed, and a heading that is gone, leave dead links."""
    for name, target in re.findall(r"\[([^\]]+)\]\((?!https?:)([^)]+)\)", "\n".join(PROSE)):
        file, _, anchor = target.partition("#")
        page = (ROOT / "docs" / file).read_text()
        headings = [line.lstrip("# ").lower().replace(" ", "-") for line in page.splitlines() if line.startswith("#")]
        assert not anchor or anchor in headings, target
        if file == "../grpo.py" and name != "`grpo.py`":
            operator.attrgetter(name.strip("`"))(grpo)

TERMS = ["policy", "code", "reward", "advantage", "LoRA", "group", "rollout", "log-prob", "entropy", "teacher forcing",
         "ratio", "clip", "surrogate", "KL", "best of k"]

@pytest.mark.parametrize("term", TERMS)
def test_each_term_is_explained_where_it_first_appears(term):
    """A term that comes before its explanation loses a reader who knows PyTorch only. The introduction and headings may
    have it."""
    paragraphs = re.sub(r"`.*?`|\]\(.*?\)|^#.*$", "", "\n\n".join(PROSE[1:]), flags=re.MULTILINE).split("\n\n")
    first = next(each for each in paragraphs if re.search(rf"\b{term}", each))
    assert f"**{term}**" in first

def test_sentences_quote_no_number_that_no_cell_has():
    """A number that was measured once, and stands in a sentence, is wrong after the next change."""
    seen = ""
    for i, cell in enumerate(SHIPPED.cells):
        if cell.cell_type == "code":
            seen += cell.source + "".join([output.get("text", "") for output in cell.outputs])
        else:
            known = seen + "".join([each.source for each in SHIPPED.cells[i + 1:i + 2]] + SOLUTION.findall(cell.source))
            for number in re.findall(r"\d+\.\d+", re.sub(r"\(http.*?\)", "", cell.source)):
                assert number in known, (number, cell.source)

# --- What it shows ----------------------------------------------------------------------------------------------
NUMBER = re.compile(r"[-+]?\d+\.\d+")  # other numbers count as words

def read_words(cell):
    """What the cell printed -> the words between the numbers, the numbers."""
    printed = "".join([output.text for output in cell.outputs if output.output_type == "stream"])
    if "__version__" in cell.source:  # those of another machine
        printed = re.sub(" .*", "", printed)
    return NUMBER.split(printed), [float(number) for number in NUMBER.findall(printed)]

def read_pictures(cell):
    return [Image.open(io.BytesIO(base64.b64decode(output.data["image/png"]))).convert("RGB")
            for output in cell.outputs if output.output_type == "display_data"]

def find_difference(picture, other):
    """The mean difference of their pixels, compared with what is not white: 0 for equal ones, and about 1 if they have
    nothing in common. Pixels are means of 8 x 8, so that a line which moves by one matters little."""
    picture, other = (np.asarray(each.resize(other.size).reduce(8)) / 255 for each in (picture, other))
    return abs(picture - other).mean() / (1 - other).mean()

def compare(shipped, made, is_trained):
    """Raises an AssertionError unless both can be outputs of the same code, on two machines. Rounding may change a code
    that is drawn, and training amplifies this."""
    assert [output.output_type for output in shipped.outputs] == [output.output_type for output in made.outputs]
    (words, numbers), (words_made, numbers_made) = read_words(shipped), read_words(made)
    assert words == words_made
    for number, number_made in zip(numbers, numbers_made, strict=True):
        tolerance = min(0.03, 0.3 * abs(number_made)) if is_trained else 0
        assert number == pytest.approx(number_made, abs=tolerance + 0.0021)
    for picture, picture_made in zip(read_pictures(shipped), read_pictures(made), strict=True):
        assert picture.size == pytest.approx(picture_made.size, abs=9)  # words and numbers at an axis
        assert find_difference(picture, picture_made) < (0.2 if is_trained else 0.02)

FIRST_TRAINING = next(i for i, cell in enumerate(CODE) if "= train(" in cell.source)

@pytest.fixture(scope="module")
def executed():
    """All cells are executed, and each solution where it stands -> the cells of CODE."""
    notebook = copy.deepcopy(TEXT)
    # No network; and bitsandbytes, which the tour does not need, says on some processors that it wants another package.
    cells = [nbformat.v4.new_code_cell("import socket, sys\nsocket.getaddrinfo = sys.modules['bitsandbytes'] = None")]
    for cell in notebook.cells:
        cells += [cell, *map(nbformat.v4.new_code_cell, SOLUTION.findall(cell.source))]
    notebook.cells = cells
    resources = {"metadata": {"path": ROOT / "docs"}}
    nbclient.NotebookClient(notebook, timeout=None, kernel_name="python3", resources=resources).execute()
    sources = [cell.source for cell in CODE]
    return [cell for cell in cells if cell.cell_type == "code" and cell.source in sources]

@pytest.mark.parametrize("i", range(len(CODE)))
def test_outputs_are_those_of_the_code(executed, i):
    """Outputs of an older code, or of none, are a frequent complaint about tutorials."""
    compare(CODE[i], executed[i], is_trained=i >= FIRST_TRAINING)

def test_solutions_are_executed():
    """A solution that nobody runs may be wrong."""
    assert len(SOLUTION.findall("\n".join(PROSE))) == "\n".join(PROSE).count("<summary>") == 3

# --- Whether the comparison would see it ------------------------------------------------------------------------
def replace_picture(output, picture):
    file = io.BytesIO()
    picture.save(file, "PNG")
    output.data["image/png"] = base64.b64encode(file.getvalue()).decode()

def make_faults(cell, older):
    """Copies of a cell, each with a fault: a number that was changed, an output that is gone or that was never made, a
    picture that is white, a mirror image, or an older one."""
    for i, output in enumerate(cell.outputs):
        fault = copy.deepcopy(cell)
        del fault.outputs[i]
        yield fault
        fault = copy.deepcopy(cell)
        fault.outputs.append(output)
        yield fault
        for match in NUMBER.finditer(output.get("text", "")) if "__version__" not in cell.source else ():
            fault = copy.deepcopy(cell)
            number = float(match[0])
            changed = f"{number + max(0.01, number / 2):.3f}"
            fault.outputs[i].text = output.text[:match.start()] + changed + output.text[match.end():]
            yield fault
        if output.output_type == "display_data":
            picture, = read_pictures(cell)
            for other in (Image.new("RGB", picture.size, "white"), ImageOps.mirror(picture), older.resize(picture.size)):
                fault = copy.deepcopy(cell)
                replace_picture(fault.outputs[i], other)
                yield fault

def test_the_comparison_sees_each_fault():
    """A comparison that lets pass what another code has made guards nothing."""
    older = Image.new("RGB", (8, 8), "white")
    count = 0
    for i, cell in enumerate(CODE):
        compare(cell, cell, is_trained=i >= FIRST_TRAINING)
        for fault in make_faults(cell, older):
            with pytest.raises(AssertionError):
                compare(fault, cell, is_trained=i >= FIRST_TRAINING)
            count += 1
        older, = read_pictures(cell) or [older]
    assert count > 100
