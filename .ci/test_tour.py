"""Tests of docs/tour.ipynb, which is executed from its text, docs/tour.py, in a fresh kernel without a network."""
import copy, re

import jupytext, nbclient, nbformat, pytest

from conftest import ROOT

TEXT = jupytext.read(ROOT / "docs/tour.py")
SHIPPED = nbformat.read(ROOT / "docs/tour.ipynb", as_version=4)
CODE = [cell for cell in SHIPPED.cells if cell.cell_type == "code"]
SOLUTION = re.compile(r"<summary>Solution</summary>\n\n```python\n(.*?)```", re.DOTALL)

def test_the_notebook_is_made_from_the_text():
    shipped, text = ([(cell.cell_type, cell.source) for cell in each.cells] for each in (SHIPPED, TEXT))
    assert shipped == text
    assert [cell.execution_count for cell in CODE] == [*range(1, len(CODE) + 1)]

NUMBER = re.compile(r"[-+]?\d+\.\d+")  # other numbers count as words

def read_words(cell):
    """What the cell printed -> the words between the numbers, the numbers."""
    printed = "".join([output.text for output in cell.outputs if output.output_type == "stream"])
    if "__version__" in cell.source:  # those of another machine
        printed = re.sub(" .*", "", printed)
    return NUMBER.split(re.sub(r"-(0\.0+\b)", r" \1", printed)), [float(number) for number in NUMBER.findall(printed)]

FIRST_TRAINING = next(i for i, cell in enumerate(CODE) if "= train(" in cell.source)
QUICK = """transformers.GlmImageProcessor._get_target_shape = (
    lambda self, height, width: (height // 32, width // 32, 2, 2))"""

@pytest.fixture(scope="module")
def executed():
    """All cells are executed, from the root, and each solution where it stands -> the cells of CODE. From the first
    training on, drafts have 2 x 2 codes, not 16 x 16: that is quick, and less is learnt than some cells demand."""
    notebook = copy.deepcopy(TEXT)
    # No network; and bitsandbytes, which the tour does not need, says on some processors that it wants another package.
    cells = [nbformat.v4.new_code_cell("import socket, sys\nsocket.getaddrinfo = sys.modules['bitsandbytes'] = None")]
    for cell in notebook.cells:
        quick = [QUICK] if cell.source == CODE[FIRST_TRAINING].source else []
        cells += [*map(nbformat.v4.new_code_cell, quick), cell]
        cells += map(nbformat.v4.new_code_cell, SOLUTION.findall(cell.source))
    notebook.cells = cells
    nbclient.NotebookClient(notebook, timeout=None, kernel_name="python3", resources={"metadata": {"path": ROOT}},
                            allow_error_names=["AssertionError", "RuntimeError"]).execute()
    sources = [cell.source for cell in CODE]
    return [cell for cell in cells if cell.cell_type == "code" and cell.source in sources]

@pytest.mark.parametrize("i", range(FIRST_TRAINING))
def test_outputs_are_those_of_the_code(executed, i):
    """Up to what rounding may do on another machine, which may change a code that is drawn."""
    shipped, made = CODE[i], executed[i]
    assert [output.output_type for output in shipped.outputs] == [output.output_type for output in made.outputs]
    (words, numbers), (words_made, numbers_made) = read_words(shipped), read_words(made)
    assert words == words_made
    assert numbers == pytest.approx(numbers_made, abs=0.0021)
