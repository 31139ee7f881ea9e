"""Valid tables of every task of evaluation, and how they are read."""

from pathlib import Path

from longhaul.pipeline.reporting.tables import TABLES, read_table

TABLE_TEXTS = {
    "positions": (
        "position,loss_nats,standard_error,mean_up_to_here,standard_error_up_to_here,samples\n"
        "1,5.0,0.5,5.0,0.5,8\n2,4.0,0.5,4.5,0.25,8\n"
    ),
    "context": "context,tokens,loss_nats,standard_error\n64,1024,5.0,0.5\n128,1024,4.0,nan\n",
    "perplexity": (
        "window,stride,documents,tokens,loss_nats,perplexity,standard_error,document_tokens,bos\n"
        "64,16,2,128,3.0,20.0,0.5,8192,no\n"
    ),
    "passkey": (
        "length,depth,prompts,right,depths,bos\n256,0.0,4,4,grid,yes\n512,0.5,4,2,grid,yes\n"
    ),
    "recall": "pairs,queries,right,chance,low,high\n4,16,16,0.25,0.75,1\n8,16,12,0.125,0.5,0.9\n",
    "attention": (
        "layer,matrix,largest,first_token_share,kurtosis,half_life,rotation,"
        "first_token_share_standard_error,kurtosis_standard_error,half_life_standard_error,windows\n"
        "0,0,2.5,0.5,3.0,7.5,0.25,0.5,nan,0.5,8\n1,0,1.5,0.25,3.5,inf,nan,0.5,0.5,nan,8\n"
    ),
    "loss_in_bins": (
        "first,last,loss_nats,standard_error,samples\n1,2,5.0,0.5,8\n3,3,4.0,0.25,8\n"
    ),
    "scores": (
        "layer,key,score,least_of_heads,most_of_heads,largest,bos\n1,1,0.5,-1.5,2.5,3.5,no\n"
        "1,2,0.25,-1.25,2.0,3.0,no\n"
    ),
}


def write_tables(folder: Path) -> None:
    for task, text in TABLE_TEXTS.items():
        (folder / f"{task}.csv").write_text(text)


def read_tables(folder: Path) -> None:
    for task in TABLES:
        text = (folder / f"{task}.csv").read_bytes().decode()
        for row in read_table(task, text, f"{task}.csv"):
            assert all(
                isinstance(row[key], int | float | str) for key in TABLES[task].row.__annotations__
            )
