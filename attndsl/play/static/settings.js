// What stands beside the program: sizes of the call, params, which kernel, and links that hold it all.

const SETTINGS = [
  { name: "q_len", label: "Queries", value: 64, min: 1, max: 1024 },
  { name: "kv_len", label: "Keys", value: "", min: 1, max: 1024, as: "q_len", hint: "as queries" },
  { name: "block_m", label: "Queries of a tile", value: 16, min: 1, max: 1024 },
  { name: "block_n", label: "Keys of a tile", value: 16, min: 1, max: 1024 },
  { name: "heads", label: "Heads", value: 4, min: 1, max: 64 },
  { name: "kv_heads", label: "Key heads", value: "", min: 1, max: 64, as: "heads", hint: "as heads" },
  { name: "h", label: "Head shown", value: 0, min: 0, max: 63 },
  { name: "batch", label: "Batch entries", value: 1, min: 1, max: 16 },
  { name: "b", label: "Entry shown", value: 0, min: 0, max: 15 },
  { name: "q_offset", label: "First query is at", value: 0, min: -1048576, max: 1048576 },
  { name: "kv_offset", label: "First key is at", value: 0, min: -1048576, max: 1048576 },
  { name: "raw_score", label: "Raw score", value: 0, min: -1e30, max: 1e30, step: "any" },
  { name: "seed", label: "Seed of tensors", value: 0, min: 0, max: 1048576 },
  { name: "cost_len", label: "Length for costs", value: 8192, min: 1, max: 131072 },
];
const ABSENT = "none"; // The value of a param that is left out.
const FORMS = {
  int: /^[-+]?\d+$/,
  float: /^[-+]?(inf|(\d+\.?\d*|\.\d+)(e[-+]?\d+)?)$/i,
  bool: /^(true|false)$/,
};
const CHOICES = ["direction", "family", "dtype", "head_dim"];

export class Settings {
  constructor(onInput) {
    this.onInput = onInput;
    this.given = new Map(); // Params that somebody has set, as text.
    this.shown = "";
    this.inputs = new Map();
    const place = document.getElementById("settings");
    for (const each of SETTINGS) {
      const label = document.createElement("label");
      label.textContent = each.label;
      const input = document.createElement("input");
      Object.assign(input, {
        type: "number", id: each.name, min: each.min, max: each.max, step: each.step ?? "1",
        value: each.value, defaultValue: each.value, required: each.as === undefined,
        placeholder: each.hint ?? "",
      });
      input.addEventListener("input", onInput);
      label.append(input);
      place.append(label);
      this.inputs.set(each.name, input);
    }
    for (const name of CHOICES) document.getElementById(name).addEventListener("input", onInput);
    document.getElementById("reset").addEventListener("click", () => {
      this.given.clear();
      this.shown = "";
      onInput();
    });
  }

  // What a request holds beside the text; or what is wrong with a field.
  read() {
    const view = {};
    for (const each of SETTINGS) {
      const input = this.inputs.get(each.name);
      if (!input.checkValidity()) return { problem: `${each.label}: give ${each.min} to ${each.max}` };
      view[each.name] = input.value === "" ? view[each.as] : Number(input.value);
    }
    const head = document.getElementById("head_dim");
    if (!head.checkValidity()) return { problem: "Head dim: give 1 to 512" };
    const kernel = { head_dim: Number(head.value) };
    for (const name of CHOICES.slice(0, 3)) kernel[name] = document.getElementById(name).value;
    return { view, kernel, params: Object.fromEntries(this.given) };
  }

  // The params of the last answer as fields; a field in use stays as it is.
  showParams(fields) {
    const place = document.getElementById("params");
    document.getElementById("params-section").hidden = fields.length === 0;
    const shown = JSON.stringify(fields.map((each) => [each.name, each.dtype]));
    if (shown !== this.shown) {
      this.shown = shown;
      place.replaceChildren(...fields.map((each) => this.paramRow(each)));
    }
    fields.forEach((each, i) => update(place.children[i], each));
  }

  paramRow(field) {
    const row = document.createElement("div");
    row.className = "param";
    const label = document.createElement("label");
    label.textContent = field.name;
    label.htmlFor = `param.${field.name}`;
    const input = document.createElement("input");
    input.id = label.htmlFor;
    const note = document.createElement("p");
    note.className = "note";
    const set = (text) => {
      this.given.set(field.name, text);
      this.onInput();
    };
    if (field.dtype === "bool" && !field.optional) {
      input.type = "checkbox";
      input.addEventListener("input", () => set(`${input.checked}`));
      row.append(label, input, note);
      return row;
    }
    const slider = document.createElement("input");
    slider.type = "range";
    slider.setAttribute("aria-label", `${field.name}, slider`);
    range(slider, field);
    input.type = "text";
    if (!field.optional) input.inputMode = "decimal";
    input.addEventListener("input", () => {
      const text = input.value.trim();
      const wrong = !FORMS[field.dtype].test(text) && !(field.optional && text === ABSENT);
      input.setCustomValidity(wrong ? `'${field.name}' is of type ${field.dtype}` : "");
      if (!wrong) set(text);
    });
    slider.addEventListener("input", () => {
      input.value = slider.value;
      input.setCustomValidity("");
      set(slider.value);
    });
    row.append(label, slider, input, note);
    return row;
  }

  // Everything as the part of an address behind '#'.
  fragment(text) {
    const found = new URLSearchParams({ program: text });
    for (const [name, input] of this.inputs) {
      if (input.value !== input.defaultValue && input.checkValidity()) found.set(name, input.value);
    }
    for (const name of CHOICES) {
      const input = document.getElementById(name);
      const usual = input.options ? input.options[0].value : input.defaultValue;
      if (input.value !== usual && input.checkValidity()) found.set(name, input.value);
    }
    for (const [name, value] of this.given) found.set(`param.${name}`, value);
    return `#${found}`;
  }

  // The program of such a part of an address, or null; the fields become what it says.
  restore(fragment) {
    const found = new URLSearchParams(fragment.replace(/^#/, ""));
    if (!found.has("program")) return null;
    for (const [name, input] of this.inputs) input.value = found.get(name) ?? input.defaultValue;
    for (const name of CHOICES) {
      const input = document.getElementById(name);
      const usual = input.options ? input.options[0].value : input.defaultValue;
      const asked = found.get(name) ?? usual;
      const possible = !input.options || [...input.options].some((each) => each.value === asked);
      input.value = possible ? asked : usual;
    }
    this.given.clear();
    for (const [name, value] of found) if (name.startsWith("param.")) this.given.set(name.slice(6), value);
    this.shown = "";
    return found.get("program");
  }
}

function update(row, field) {
  const input = row.querySelector("input[type=text], input[type=checkbox]");
  const slider = row.querySelector("input[type=range]");
  const using = document.activeElement === input || document.activeElement === slider;
  if (input.type === "checkbox") {
    input.checked = field.value === "true";
  } else if (!using) {
    if (!(Number(slider.min) <= Number(field.value) && Number(field.value) <= Number(slider.max))) range(slider, field);
    input.value = slider.value = field.value;
    input.value = field.value;
    input.setCustomValidity("");
  }
  const note = row.querySelector(".note");
  note.textContent = field.made_up ? "made up: the program gives no default" : "";
  if (field.optional) note.textContent = field.value === ABSENT ? "left out" : `${note.textContent}${field.made_up ? "; " : ""}none leaves it out`;
  note.hidden = note.textContent === "";
}

function range(slider, field) {
  const value = Number(field.value);
  slider.hidden = !(Math.abs(value) < 1e15);
  if (slider.hidden) return;
  const whole = field.dtype === "int";
  slider.min = Math.min(0, 2 * value);
  slider.max = value > 0 ? Math.max(2 * value, whole ? 16 : 0) : whole ? 16 : 1;
  slider.step = whole ? 1 : (slider.max - slider.min) / 200;
  slider.value = value;
}
