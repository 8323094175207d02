// The page: what is typed is asked about, and what is answered is shown.

import { Asker } from "./asker.js";
import { Editor } from "./editor.js";
import { Settings } from "./settings.js";

const at = (id) => document.getElementById(id);
const SETTLED = 250; // Milliseconds without typing after which details are asked for.
const LEAST_SCALE = 0.68;
const CALM = 600; // The same for what screen readers are told.

const editor = new Editor(changed);
const settings = new Settings(changed);
const picture = new Asker("picture", showPicture);
const details = new Asker("details", showDetails);
const kernel = new Asker("kernel", showKernel);
const layout = new Asker("layout", showLayout);
const timers = {};

function later(name, delay, action) {
  clearTimeout(timers[name]);
  timers[name] = setTimeout(action, delay);
}

function state() {
  const { problem, ...rest } = settings.read();
  if (problem !== undefined) return { problem };
  return { text: editor.text, ...rest };
}

function changed() {
  const asked = state();
  if (asked.problem !== undefined) {
    say(asked.problem, true);
    return;
  }
  picture.ask(asked);
  later("link", 300, () => history.replaceState(null, "", settings.fragment(editor.text)));
}

function showPicture(answer, asked) {
  const found = answer.result;
  document.body.dataset.state = found === null ? "wrong" : "right";
  // The text may have changed since: then places would be wrong, and another answer is on its way.
  if (asked.text === editor.text) showProblems(answer.problems);
  for (const each of document.querySelectorAll(".right section")) each.classList.toggle("stale", found === null);
  at("paper").classList.toggle("old", found === null);
  at("stale").hidden = found !== null || at("picture").hidden;
  if (found === null) return;
  const image = at("picture");
  const address = URL.createObjectURL(new Blob([found.svg], { type: "image/svg+xml" }));
  const before = image.src;
  image.src = address;
  image.alt = found.summary;
  image.hidden = false;
  at("save").href = address;
  at("save").hidden = false;
  if (before) URL.revokeObjectURL(before);
  note("made-up", found.made_up && `Made up, seed ${asked.view.seed}: ${found.made_up}.`);
  settings.showParams(found.params);
  at("derivative").textContent = found.derivative;
  note("curve", found.curve && `${found.curve[0].toUpperCase()}${found.curve.slice(1)}.`);
  later("details", SETTLED, () => {
    for (const each of document.querySelectorAll(".slow")) each.classList.add("busy");
    details.ask(asked);
    kernel.ask(asked);
  });
}

function showProblems(found) {
  editor.mark(found);
  at("problems").replaceChildren(...found.map((each) => {
    const item = document.createElement("li");
    const inner = document.createElement(each.start === null ? "div" : "button");
    if (each.start === null) {
      inner.className = "plain";
    } else {
      inner.type = "button";
      inner.addEventListener("click", () => editor.select(each));
    }
    const rows = [["where", each.where], ["message", each.message], ["hint", each.hint && `Hint: ${each.hint}`]];
    for (const [name, text] of rows) {
      if (!text) continue;
      const span = document.createElement("span");
      span.className = name;
      span.textContent = text;
      inner.append(span);
    }
    item.append(inner);
    return item;
  }));
  const count = found.length;
  if (count === 0) {
    say("No errors.", false);
  } else {
    const first = `${found[0].where ? `${found[0].where}: ` : ""}${found[0].message}`;
    say(`${count} ${count === 1 ? "error" : "errors"}.`, true, first);
  }
}

// What is wrong now is seen in the list at once; it is said when typing pauses.
function say(text, wrong, more = "") {
  later("status", wrong ? CALM : 0, () => {
    const unseen = document.createElement("span");
    unseen.className = "hidden";
    unseen.textContent = ` ${more}`;
    at("status").replaceChildren(text, unseen);
    at("status").classList.toggle("wrong", wrong);
  });
}

function settle(id) {
  at(id).closest("section").classList.remove("busy");
}

function showDetails(answer) {
  settle("cost");
  settle("loops");
  const found = answer.result;
  if (found === null) {
    note("cost-problem", problemText(answer.problems[0]));
    return;
  }
  at("loops").textContent = found.loops;
  at("explanation").textContent = found.explanation;
  at("cost").textContent = found.cost;
  note("cost-problem", found.cost_problem && problemText(found.cost_problem));
  note("cost-made-up", found.made_up && `Made up: ${found.made_up}.`);
  const [caption, ...rows] = found.costs.split("\n");
  const table = at("costs");
  table.replaceChildren();
  table.hidden = caption === "";
  table.createCaption().textContent = caption;
  for (const row of rows) {
    const [, name, rest] = /^\s*(\S+)\s+(.*)$/.exec(row) ?? [null, "", row];
    const line = table.insertRow();
    const head = document.createElement("th");
    head.scope = "row";
    head.textContent = name;
    line.append(head);
    line.insertCell().textContent = rest;
  }
}

function showKernel(answer) {
  settle("kernel");
  note("kernel-problem", answer.result === null ? problemText(answer.problems[0]) : "");
  at("kernel").textContent = answer.result === null ? "" : answer.result.text;
  at("kernel").hidden = answer.result === null;
}

function showLayout(answer, asked) {
  if (answer.result === null) {
    toast("A program with errors is not formatted.");
  } else if (asked.text === editor.text && answer.result.text !== asked.text) {
    editor.replace(answer.result.text);
  }
}

function problemText(problem) {
  return problem.hint ? `${problem.message} (${problem.hint})` : problem.message;
}

function note(id, text) {
  at(id).textContent = text || "";
  at(id).hidden = !text;
}

function toast(text) {
  at("toast").textContent = text;
  later("toast", 2500, () => (at("toast").textContent = ""));
}

async function copy(text, what) {
  try {
    await navigator.clipboard.writeText(text);
    toast(`Copied ${what}.`);
  } catch {
    toast("The browser does not let this page copy: select the text, and copy it.");
  }
}

function format() {
  layout.ask({ text: editor.text });
}

function begin(text) {
  editor.text = text;
  changed();
}

function offerExamples(groups) {
  const texts = new Map();
  for (const [name, examples] of groups) {
    const group = document.createElement("optgroup");
    group.label = name;
    for (const [title, text] of examples) {
      const option = document.createElement("option");
      option.textContent = title;
      option.value = `${texts.size}`;
      texts.set(option.value, text);
      group.append(option);
    }
    at("example").append(group);
  }
  at("example").addEventListener("input", (event) => {
    const text = texts.get(event.target.value);
    if (text === undefined) return;
    settings.given.clear();
    const was = document.activeElement;
    editor.replace(text); // It can be undone.
    was.focus();
    event.target.value = "";
  });
  return texts.get("0");
}

function choose(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
  at("theme").value = theme;
  try {
    localStorage.setItem("attndsl-theme", theme);
  } catch {
    // Nothing is kept where the browser keeps nothing.
  }
}

function kept() {
  try {
    return localStorage.getItem("attndsl-theme") ?? "";
  } catch {
    return "";
  }
}

choose(kept());
at("theme").addEventListener("input", (event) => choose(event.target.value));
at("format").addEventListener("click", format);
at("link").addEventListener("click", () => {
  history.replaceState(null, "", settings.fragment(editor.text));
  copy(location.href, "the link");
});
for (const button of document.querySelectorAll("[data-copy]")) {
  const source = at(button.dataset.copy);
  const what = source.id === "text" ? "the program" : `the ${source.id}`;
  button.addEventListener("click", () => copy(source.value ?? source.textContent, what));
}
document.addEventListener("keydown", (event) => {
  const command = event.ctrlKey || event.metaKey;
  if (event.key === "F8") {
    event.preventDefault();
    editor.step(event.shiftKey);
  } else if (command && event.key === "Enter") {
    event.preventDefault();
    changed();
  } else if (command && event.shiftKey && event.key.toLowerCase() === "f") {
    event.preventDefault();
    format();
  }
});
// Letters of wide pictures stay large enough to read, and the picture scrolls.
at("picture").addEventListener("load", () => {
  at("picture").style.minWidth = `${LEAST_SCALE * at("picture").naturalWidth}px`;
});
at("call").open = window.innerWidth >= 1000;
window.addEventListener("hashchange", () => {
  const text = settings.restore(location.hash);
  if (text !== null) begin(text);
});

const listed = await (await fetch("/examples.json")).json();
const first = offerExamples(listed.groups);
editor.highlight(listed.words);
begin(settings.restore(location.hash) ?? first);
