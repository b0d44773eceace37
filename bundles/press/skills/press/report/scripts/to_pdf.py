"""The report as a PDF with the built-in fonts, written by fpdf2."""

from __future__ import annotations

import io
import logging
import unicodedata

from document import Block, Document, PressError, Span
from fpdf import FPDF
from fpdf.enums import XPos, YPos
from fpdf.errors import FPDFException
from fpdf.fonts import FontFace

PLAIN = str.maketrans(
    {
        "\u2010": "-",
        "\u2011": "-",
        "\u2012": "-",
        "\u2013": "-",
        "\u2014": "-",
        "\u2212": "-",
        "\u2026": "...",
        "\u2018": "'",
        "\u2019": "'",
        "\u201c": '"',
        "\u201d": '"',
        "\u2022": "\u00b7",
        "\u00a0": " ",
        "\u2009": " ",
        "\u202f": " ",
    }
)
INK, ACCENT, MUTED = (31, 41, 51), (180, 55, 31), (82, 96, 109)


class Press(FPDF):
    """An A4 page with a page number, counting the characters it had to replace."""

    replaced = 0

    def footer(self) -> None:
        """Write the page number."""
        self.set_y(-14)
        self.set_font("Helvetica", size=8)
        self.set_text_color(*MUTED)
        self.cell(0, 8, f"{self.page_no()} / {{nb}}", align="R")

    def fit(self, text: str) -> str:
        """Return *text* in the characters the built-in fonts have."""
        plain = text.translate(PLAIN)
        out = []
        for char in plain:
            if ord(char) < 256:
                out.append(char)
                continue
            self.replaced += 1
            base = unicodedata.normalize("NFKD", char).encode("latin-1", "ignore").decode("latin-1")
            out.append(base or "?")
        return "".join(out)

    @property
    def epw_left(self) -> float:
        """Width left on this line."""
        return self.w - self.r_margin - self.get_x() - 2 * self.c_margin

    def spans(self, spans: tuple[Span, ...], numbers: dict[int, int], size: float = 10.5, height: float = 5.4) -> None:
        """Write a run of spans, breaking lines at the margin."""
        for span in spans:
            style = ("B" if span.bold else "") + ("I" if span.italic else "")
            if span.cited:
                self.set_font("Helvetica", size=size * 0.65)
                self.set_text_color(*ACCENT)
                self.write(height * 0.62, " " + ",".join(str(numbers[n]) for n in span.cited))
            else:
                self.set_font("Courier" if span.code else "Helvetica", style, size)
                self.set_text_color(*(ACCENT if span.href else INK))
                text = self.fit(span.text)
                first = text.split(" ", 1)[0]
                if first and self.get_x() > self.l_margin and self.get_string_width(first) > self.epw_left:
                    self.ln(height)  # a word that begins a span is never cut at the margin
                self.write(height, text, span.href or "")
        self.set_text_color(*INK)


def write_block(pdf: Press, block: Block, numbers: dict[int, int]) -> None:
    """Write one block and the space below it."""
    match block.kind:
        case "heading":
            size = {1: 19, 2: 13.5}.get(block.level, 11.5)
            pdf.ln(0 if block.level == 1 else 2)
            bold = tuple(Span(s.text, True, s.italic, s.code, s.href, s.cited) for s in block.spans)
            pdf.spans(bold, numbers, size, size * 0.5)
            pdf.ln(size * 0.5 + 1.5)
            if block.level == 1:
                pdf.set_draw_color(*ACCENT)
                pdf.set_line_width(0.7)
                pdf.line(pdf.l_margin, pdf.get_y(), pdf.w - pdf.r_margin, pdf.get_y())
                pdf.ln(4)
        case "figure":
            pdf.image(io.BytesIO(block.figure), w=pdf.epw, keep_aspect_ratio=True)
            pdf.ln(1)
            pdf.spans(tuple(Span(s.text, italic=True, cited=s.cited) for s in block.spans), numbers, 9)
            pdf.ln(8)
        case "table":
            write_table(pdf, block)
        case "code":
            pdf.set_font("Courier", "", 9)
            pdf.set_text_color(*INK)
            pdf.set_fill_color(245, 247, 250)
            pdf.multi_cell(0, 4.6, pdf.fit(block.spans[0].text), fill=True, new_x=XPos.LMARGIN, new_y=YPos.NEXT)
            pdf.ln(3)
        case "rule":
            pdf.line(pdf.l_margin, pdf.get_y(), pdf.w - pdf.r_margin, pdf.get_y())
            pdf.ln(4)
        case _:
            indent = 6 * (block.level or (1 if block.kind == "quote" else 0))
            margin = pdf.l_margin
            pdf.set_left_margin(margin + indent)
            pdf.set_x(margin + indent)
            marker = (Span(block.marker + "  "),) if block.marker else ()
            pdf.spans(marker + block.spans, numbers)
            pdf.set_left_margin(margin)
            pdf.ln(6 if block.kind == "item" else 8)


def write_table(pdf: Press, block: Block) -> None:
    """Write a table with a bold header line; citations within it are written as bracketed numbers."""
    pdf.set_font("Helvetica", size=9.5)
    pdf.set_draw_color(200, 205, 212)
    pdf.set_line_width(0.2)
    bold = FontFace(emphasis="BOLD")
    with pdf.table(headings_style=bold, line_height=5.6, borders_layout="HORIZONTAL_LINES", text_align="LEFT") as table:
        for row in block.rows:
            line = table.row()
            for cell in row:
                line.cell(pdf.fit("".join(f"[{','.join(map(str, s.cited))}]" if s.cited else s.text for s in cell)))
    pdf.ln(4)


def to_pdf(document: Document) -> tuple[bytes, int]:
    """Return the PDF's bytes and how many characters had to be replaced."""
    # fpdf2 warns of <title> and <desc> in every figure; they are for screen readers and have no place on paper
    logging.getLogger("fpdf.svg").setLevel(logging.ERROR)
    pdf = Press(format="A4")
    pdf.set_title(document.title)
    pdf.set_creator("kdskills press.report")
    pdf.set_margins(20, 18, 20)
    pdf.set_auto_page_break(auto=True, margin=18)
    pdf.alias_nb_pages()
    pdf.add_page()
    numbers = {source.number: index for index, source in enumerate(document.sources, start=1)}
    try:
        for block in document.blocks:
            write_block(pdf, block, numbers)
        if document.sources:
            write_block(pdf, Block("heading", (Span("Sources"),), level=2), numbers)
        for source in document.sources:
            words = (Span(f"{numbers[source.number]}.  "), Span(source.title, href=source.href))
            pdf.spans(words, numbers, 9, 4.8)
            pdf.ln(5.4)
        return bytes(pdf.output()), pdf.replaced
    except (FPDFException, ValueError, OSError) as error:
        raise PressError(f"the PDF cannot be written: {error}") from error
