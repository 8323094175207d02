// node tokenise.js NODE_MODULES SCOPE GRAMMARS... < text: a JSON list of lines of [text, scopes].
const fs = require("fs"), path = require("path");
const modules = process.argv[2];
const load = (name) => require(path.join(modules, name));
const { Registry, parseRawGrammar, INITIAL } = load("vscode-textmate");
const oniguruma = load("vscode-oniguruma");
const wasm = fs.readFileSync(path.join(modules, "vscode-oniguruma/release/onig.wasm")).buffer;
const files = process.argv.slice(4);
const raw = files.map((file) => parseRawGrammar(fs.readFileSync(file, "utf8"), file));
const lib = oniguruma.loadWASM(wasm).then(() => ({
  createOnigScanner: (patterns) => new oniguruma.OnigScanner(patterns),
  createOnigString: (text) => new oniguruma.OnigString(text),
}));
const registry = new Registry({
  onigLib: lib,
  loadGrammar: async (scope) => raw.find((grammar) => grammar.scopeName === scope) || null,
  getInjections: (scope) => scope === process.argv[3] ? raw.filter((g) => g.injectionSelector).map((g) => g.scopeName) : [],
});
registry.loadGrammar(process.argv[3]).then((grammar) => {
  let state = INITIAL;
  const out = fs.readFileSync(0, "utf8").split("\n").map((line) => {
    const found = grammar.tokenizeLine(line, state);
    state = found.ruleStack;
    return found.tokens.map((t) => [line.slice(t.startIndex, t.endIndex), t.scopes]);
  });
  console.log(JSON.stringify(out));
});
