from dataclasses import replace

from headwater.traces.request import Request, Trace
from papers import Figure, Found, Lab, Line, Shape, figures_named, page_of
from papers.lab import measure
from papers.page import given, number


def figure(name="paper-1", holds=True):
    found = Found((Line("at 1 GB", 4.5, 12.3456, "x"), Line("ours only", None, 2_000_000)), Shape("it grows", holds))
    return Figure(name, "A title", "A paper, figure 1", "it grows.", "Other data.", lambda lab: found)


def test_page_shows_figures_and_claims_that_failed():
    figures = [figure(), figure("paper-2", holds=False)]
    page = page_of(figures, {one.name: measure(one, Lab()) for one in figures})
    assert "| at 1 GB | 4.5 | 12.3 | x |" in page
    assert "| ours only |  | 2,000,000 |  |" in page
    assert "| [paper-1](#paper-1) | A title | 1 of 1 |" in page
    assert "| [paper-2](#paper-2) | A title | 0 of 1 |" in page
    assert page.count("**did not come out**") == 1


def test_page_depends_only_on_documents_and_texts():
    one = figure()
    documents = {one.name: measure(one, Lab())}
    assert page_of([one], documents) == page_of([one, figure("never-ran")], documents)
    documents[one.name]["rows"][0]["ours"] = 99.0
    assert "| at 1 GB | 4.5 | 99 | x |" in page_of([one], documents)


def test_measured_figures_are_not_labelled_as_formulas():
    of_formulas = figure()
    measured = replace(of_formulas, run=None)
    document = measure(of_formulas, Lab(seed=7)) | {"seconds": 654.9}
    assert "_Only from the model's formulas._" in page_of([of_formulas], {"paper-1": document})
    page = page_of([measured], {"paper-1": document})
    assert "formulas" not in page
    assert "_Measured by a benchmark. Seed 7, 655 s._" in page


def test_figure_of_a_trace_that_was_not_replayed_names_the_trace():
    def run(lab):
        lab.note(Trace("chats", [Request("s", b"", 2_500_000, 0, 0)]))
        return Found([Line("median", None, 1.0)])

    of_trace = replace(figure(), run=run)
    page = page_of([of_trace], {"paper-1": measure(of_trace, Lab())})
    assert "chats, 1 requests, 2.5 M prompt tokens._" in page


def test_numbers_near_zero_are_not_shown_as_zero():
    assert [number(x) for x in (3.39e-7, -0.000123, 0.0, 0.00123)] == ["3.39e-07", "-0.000123", "0", "0.001"]


def test_own_numbers_have_three_digits_papers_are_as_printed():
    assert [number(x) for x in (None, 17.4032, 0.81999, 3.3198, 1234.56, 2e12)] == [
        "", "17.4", "0.820", "3.32", "1,235", "2,000,000,000,000",
    ]  # fmt: skip
    assert [given(x) for x in (None, 17.4, 16_384)] == ["", "17.4", "16,384"]


def test_papers_name_means_all_of_its_figures():
    names = [one.name for one in figures_named(["marconi"])]
    assert "marconi-table1" in names
    assert all(name.startswith("marconi-") for name in names)
    assert [one.name for one in figures_named(["marconi-3b"])] == ["marconi-3b"]
