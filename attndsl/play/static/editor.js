// The text of the program: a textarea over a copy of its text that is highlighted and marked.

const TOKEN = /#[^\n]*|(?:\d[\w.]*|\.\d[\w.]*)|[A-Za-z_]\w*/g;

export class Editor {
  constructor(onInput) {
    this.area = document.getElementById("text");
    this.overlay = document.getElementById("overlay");
    this.numbers = document.getElementById("numbers");
    this.statements = new Set();
    this.names = new Set();
    this.problems = [];
    this.leaving = false;
    this.area.addEventListener("input", () => {
      // Marks are of the text before: they would be beside what they are about.
      this.problems = [];
      this.draw();
      onInput();
    });
    this.area.addEventListener("scroll", () => this.scroll());
    this.area.addEventListener("keydown", (event) => this.keydown(event));
    this.area.addEventListener("blur", () => (this.leaving = false));
  }

  get text() {
    return this.area.value;
  }

  set text(text) {
    this.area.value = text;
    this.problems = [];
    this.draw();
  }

  // As if it had been typed, so that it can be undone.
  replace(text) {
    this.area.focus();
    this.area.select();
    insert(this.area, text);
  }

  highlight(words) {
    this.statements = new Set(words.statement);
    this.names = new Set(words.name);
    this.draw();
  }

  mark(problems) {
    this.problems = problems.filter((each) => each.start !== null);
    this.draw();
  }

  select(problem) {
    this.area.focus();
    this.area.setSelectionRange(problem.start, problem.end);
    const line = this.text.slice(0, problem.start).split("\n").length - 1;
    const height = 21;
    if (line * height < this.area.scrollTop || (line + 2) * height > this.area.scrollTop + this.area.clientHeight) {
      this.area.scrollTop = Math.max(0, (line - 2) * height);
    }
  }

  // The next problem behind the caret, or before it; the first one again after the last.
  step(back) {
    const sorted = [...this.problems].sort((a, b) => a.start - b.start);
    if (sorted.length === 0) return;
    const caret = this.area.selectionStart;
    const found = back
      ? sorted.reverse().find((each) => each.start < caret)
      : sorted.find((each) => each.start > caret);
    this.select(found ?? sorted[0]);
  }

  keydown(event) {
    if (event.key === "Escape") {
      this.leaving = true;
    } else if (event.key === "Tab" && !event.shiftKey && !event.ctrlKey && !event.altKey && !this.leaving) {
      event.preventDefault();
      insert(this.area, "    ");
    } else if (event.key !== "Tab" && event.key !== "Shift") {
      this.leaving = false;
    }
  }

  draw() {
    const text = this.text;
    const fragment = document.createDocumentFragment();
    let end = 0;
    for (const found of text.matchAll(TOKEN)) {
      this.append(fragment, text, end, found.index, "");
      end = found.index + found[0].length;
      this.append(fragment, text, found.index, end, this.kindOf(found[0]));
    }
    this.append(fragment, text, end, text.length, "");
    for (const each of this.problems) {
      if (each.start === each.end && each.start >= text.length) fragment.append(marked("", true));
    }
    // A last line without letters has no height otherwise.
    fragment.append("\n");
    this.overlay.replaceChildren(fragment);
    this.drawNumbers(text);
    this.scroll();
  }

  kindOf(token) {
    if (token[0] === "#") return "comment";
    if (/[\d.]/.test(token[0])) return "number";
    return this.statements.has(token) ? "statement" : this.names.has(token) ? "name" : "";
  }

  // The characters from start to end, cut where marks begin and end.
  append(fragment, text, start, end, kind) {
    const cuts = new Set([start, end]);
    for (const each of this.problems) {
      for (const place of [each.start, each.end]) if (start < place && place < end) cuts.add(place);
    }
    const places = [...cuts].sort((a, b) => a - b);
    for (let i = 0; i + 1 < places.length; i++) {
      const shown = text.slice(places[i], places[i + 1]);
      let node = document.createTextNode(shown);
      if (kind) {
        const span = document.createElement("span");
        span.className = kind;
        span.append(node);
        node = span;
      }
      const wrong = this.problems.some((each) => each.start <= places[i] && places[i + 1] <= each.end);
      fragment.append(wrong ? marked(node, false) : node);
    }
  }

  drawNumbers(text) {
    const wrong = new Set(this.problems.map((each) => text.slice(0, each.start).split("\n").length));
    const count = text.split("\n").length;
    const fragment = document.createDocumentFragment();
    for (let line = 1; line <= count; line++) {
      if (wrong.has(line)) {
        const span = document.createElement("span");
        span.className = "wrong";
        span.textContent = `${line}`;
        fragment.append(span, "\n");
      } else {
        fragment.append(`${line}\n`);
      }
    }
    // As tall as the text where that has a scroll bar below it.
    fragment.append("\n\n");
    this.numbers.replaceChildren(fragment);
  }

  scroll() {
    this.overlay.scrollTop = this.numbers.scrollTop = this.area.scrollTop;
    this.overlay.scrollLeft = this.area.scrollLeft;
  }
}

function marked(content, empty) {
  const mark = document.createElement("mark");
  if (empty) mark.className = "empty";
  mark.append(content);
  return mark;
}

function insert(area, text) {
  // Deprecated, and the only way that keeps what can be undone.
  const done = text === "" ? document.execCommand("delete") : document.execCommand("insertText", false, text);
  if (!done) {
    area.setRangeText(text, area.selectionStart, area.selectionEnd, "end");
    area.dispatchEvent(new Event("input", { bubbles: true }));
  }
}
