"""Tables of evaluations that may come from another machine."""

import pytest

from longhaul.pipeline.reporting.tables import read_table

POSITIONS = "position,loss_nats,standard_error,mean_up_to_here,standard_error_up_to_here,samples\n"
PASSKEY = "length,depth,prompts,right,accuracy,depths,bos\n"
PERPLEXITY = (
    "window,stride,documents,tokens,loss_nats,perplexity,standard_error,document_tokens,bos\n"
)


def test_a_row_has_numbers_in_the_columns_of_its_task() -> None:
    text = f"more,{POSITIONS}7,1,3,nan,2,nan,8\n"
    (row,) = read_table("positions", text, "x.csv")
    assert (row["position"], row["mean_up_to_here"], row["samples"]) == (1, 2.0, "8")
    assert row["more"] == "7"
    assert row["standard_error"] != row["standard_error"]  # of one window


@pytest.mark.parametrize(
    ("task", "text", "message"),
    [
        ("positions", "", "found no rows"),
        ("positions", POSITIONS, "found no rows"),
        ("positions", f"{POSITIONS}1,2,3,4,5,6,7\n", r"row 1: found \['7'\] after the last column"),
        ("positions", f"{POSITIONS}1,2,3\n", "row 1: mean_up_to_here: found null, wanted"),
        (
            "positions",
            f"{POSITIONS}1,2,3,4,5,6\n-1,2,3,4,5,6\n",
            "row 2: position: found '-1'",
        ),
        (
            "positions",
            f"{POSITIONS}1.5,2,3,4,5,6\n",
            "row 1: position: found '1.5', wanted a",
        ),
        (
            "positions",
            f"{POSITIONS}{10**30},2,3,4,5,6\n",
            "row 1: position: found '10+', wanted",
        ),
        (
            "positions",
            f"{POSITIONS}1,=1+1,3,4,5,6\n",
            "row 1: loss_nats: found '=1.1', wanted",
        ),
        (
            "positions",
            f"{POSITIONS}1,nan,3,4,5,6\n",
            "row 1: loss_nats: found nan, wanted 0",
        ),
        (
            "positions",
            f"{POSITIONS}1,2,3,-inf,5,6\n",
            "row 1: mean_up_to_here: found -inf, wan",
        ),
        (
            "perplexity",
            f"{PERPLEXITY}64,1,1,64,2,0,0,all,no\n",
            "row 1: perplexity: found 0, wan",
        ),
        (
            "recall",
            "pairs,queries,right,low,high,chance\n4,4,1,0,1,2\n",
            "row 1: chance: found 2, wanted 0 to",
        ),
        (
            "scores",
            "layer,key,score,least_of_heads,most_of_heads,largest,bos\n1,1,1,1,1,inf,yes\n",
            "row 1: largest: found inf, wanted 0 to 1e.30",
        ),
        ("positions", f'{POSITIONS}1,"2,3,4\n', "found no CSV: "),
        ("positions", f"{POSITIONS}{'x' * 200_000},2,3,4\n", "found no CSV: field larger"),
        ("context", "context,loss_nats\n64,2.5\n", "row 1: tokens: found nothing, wanted a value"),
        (
            "perplexity",
            f"{PERPLEXITY}64,0,1,64,2,2,0,all,no\n",
            "row 1: stride: found '0', wanted gr",
        ),
        (
            "perplexity",
            f"{PERPLEXITY}64,1,1,64,2,2,0,all,maybe\n",
            "row 1: bos: found 'maybe', wanted 'yes' or 'no'",
        ),
        ("passkey", PASSKEY, "found no rows"),
        ("passkey", f"{PASSKEY}256,0,0,0,0,grid,no\n", "row 1: prompts: found '0', wanted greater"),
        (
            "passkey",
            f"{PASSKEY}256,0,4,5,1,grid,no\n",
            "row 1: right: found 5, wanted at most prompts = 4",
        ),
    ],
)
def test_another_table_is_one_line(task: str, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^x.csv: {message}[^\n]*$"):
        read_table(task, text, "x.csv")
