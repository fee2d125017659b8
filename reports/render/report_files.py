"""What `crossover report` writes: page, Markdown, CSV, JSON, a picture, and pods as YAML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from crossover.models.weights.weights_manifest import write_atomically
from crossover.reports.answers.cores_needed import pods_yaml
from crossover.reports.answers.model_answers import ModelAnswer
from crossover.reports.errors import MissingPackage, ReportError
from crossover.reports.render.json_and_csv import as_csv, as_json, levels_records
from crossover.reports.render.markdown import markdown
from crossover.reports.report_data import ReportData


def write_report(
    data: ReportData, answers: Sequence[ModelAnswer], folder: Path, formats: Sequence[str]
) -> list[Path]:
    """Write the report in these formats. Return the paths of the files, the page first.

    Where the packages that draw charts are not installed, Markdown is written without topics.
    Raises ReportError if the folder cannot be written, and MissingPackage if a page or a picture is
    asked for without these packages.
    """
    contents: dict[str, bytes] = {}
    sections = []
    if {"html", "md", "png"} & set(formats):
        try:
            # These import altair, which takes half a second.
            from crossover.reports.render.html_page import page
            from crossover.reports.sections.all_sections import sections_of

            sections = sections_of(data, answers)
        except MissingPackage:
            if {"html", "png"} & set(formats):
                raise
    if "html" in formats:
        contents["index.html"] = page(data, answers, sections).encode()
    if "md" in formats:
        contents["report.md"] = markdown(data, answers, sections).encode()
    if "png" in formats:
        from crossover.reports.render.first_screen_png import picture

        contents["report.png"] = picture(data, answers)
    if "csv" in formats:
        contents["levels.csv"] = as_csv(levels_records(data))
    if "json" in formats:
        contents["report.json"] = as_json(data, answers)
    if "yaml" in formats and (resources := pods_yaml(data)):
        contents["pods.yaml"] = resources.encode()
    return write_folder(folder, contents)


def write_folder(folder: Path, contents: Mapping[str, bytes]) -> list[Path]:
    """Write files into a folder, which is made if it does not exist. Return their paths.

    `contents`: name of a file -> its bytes. Raises ReportError if the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            write_atomically(folder / name, content)
    except OSError as problem:
        raise ReportError(f"{folder} cannot be written: {problem.strerror}") from problem
    return [folder / name for name in contents]
