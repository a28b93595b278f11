"""Tests of docs/tour.ipynb. It is executed from its text, docs/tour.py, in a fresh kernel without a network, and what it
shows must be what comes out: the same words, about the same numbers, about the same pictures."""
import base64, copy, io, operator, re

import jupytext, nbclient, nbformat, numpy as np, pytest
from PIL import Image

import grpo
from conftest import ROOT

TEXT = jupytext.read(ROOT / "docs/tour.py")
SHIPPED = nbformat.read(ROOT / "docs/tour.ipynb", as_version=4)
CODE = [cell for cell in SHIPPED.cells if cell.cell_type == "code"]
PROSE = "\n".join([cell.source for cell in SHIPPED.cells if cell.cell_type == "markdown"])
SOLUTION = re.compile(r"<summary>Solution</summary>\n\n```python\n(.*?)```", re.DOTALL)

def test_the_notebook_is_made_from_the_text():
    """In one run, and without warnings, progress bars and folders of one machine."""
    shipped, text = ([(cell.cell_type, cell.source) for cell in each.cells] for each in (SHIPPED, TEXT))
    assert shipped == text
    assert [cell.execution_count for cell in CODE] == [*range(1, len(CODE) + 1)]
    for output in [output for cell in CODE for output in cell.outputs]:
        assert output.output_type == "display_data" or output.name == "stdout"
        assert not re.search(r"Warning|%\||(/[\w.-]+){2}", output.get("text", "")), output.text

def test_links_hold():
    """Functions of grpo.py, and pages."""
    for name, target in re.findall(r"\[([^\]]+)\]\((?!https?:)([^)]+)\)", PROSE):
        assert (ROOT / "docs" / target.partition("#")[0]).exists(), target
        if target == "../grpo.py" and name != "`grpo.py`":
            operator.attrgetter(name.strip("`"))(grpo)

# --- What it shows ----------------------------------------------------------------------------------------------
NUMBER = re.compile(r"[-+]?\d+\.\d+")  # other numbers count as words

def read_words(cell):
    """What the cell printed -> the words between the numbers, the numbers."""
    printed = "".join([output.text for output in cell.outputs if output.output_type == "stream"])
    if "__version__" in cell.source:  # those of another machine
        printed = re.sub(" .*", "", printed)
    # A loss of 0 may have either sign.
    return NUMBER.split(re.sub(r"-(0\.0+\b)", r" \1", printed)), [float(number) for number in NUMBER.findall(printed)]

def read_pictures(cell):
    return [Image.open(io.BytesIO(base64.b64decode(output.data["image/png"]))).convert("RGB")
            for output in cell.outputs if output.output_type == "display_data"]

def find_difference(picture, other):
    """The mean difference of their pixels, compared with what is not white: 0 for equal ones, and about 1 if they have
    nothing in common. Pixels are means of 8 x 8, so that a line which moves by one matters little."""
    picture, other = (np.asarray(each.resize(other.size).reduce(8)) / 255 for each in (picture, other))
    return abs(picture - other).mean() / (1 - other).mean()

FIRST_TRAINING = next(i for i, cell in enumerate(CODE) if "= train(" in cell.source)

@pytest.fixture(scope="module")
def executed():
    """All cells are executed, from the root, and each solution where it stands -> the cells of CODE."""
    notebook = copy.deepcopy(TEXT)
    # No network; and bitsandbytes, which the tour does not need, says on some processors that it wants another package.
    cells = [nbformat.v4.new_code_cell("import socket, sys\nsocket.getaddrinfo = sys.modules['bitsandbytes'] = None")]
    for cell in notebook.cells:
        cells += [cell, *map(nbformat.v4.new_code_cell, SOLUTION.findall(cell.source))]
    notebook.cells = cells
    resources = {"metadata": {"path": ROOT}}
    nbclient.NotebookClient(notebook, timeout=None, kernel_name="python3", resources=resources).execute()
    sources = [cell.source for cell in CODE]
    return [cell for cell in cells if cell.cell_type == "code" and cell.source in sources]

@pytest.mark.parametrize("i", range(len(CODE)))
def test_outputs_are_those_of_the_code(executed, i):
    """Up to what rounding may do on another machine, which may change a code that is drawn; training amplifies this."""
    shipped, made, is_trained = CODE[i], executed[i], i >= FIRST_TRAINING
    assert [output.output_type for output in shipped.outputs] == [output.output_type for output in made.outputs]
    (words, numbers), (words_made, numbers_made) = read_words(shipped), read_words(made)
    assert words == words_made
    for number, number_made in zip(numbers, numbers_made, strict=True):
        tolerance = min(0.03, 0.3 * abs(number_made)) if is_trained else 0
        assert number == pytest.approx(number_made, abs=tolerance + 0.0021)
    for picture, picture_made in zip(read_pictures(shipped), read_pictures(made), strict=True):
        assert picture.size == pytest.approx(picture_made.size, abs=9)  # words and numbers at an axis
        assert find_difference(picture, picture_made) < (0.2 if is_trained else 0.02)
