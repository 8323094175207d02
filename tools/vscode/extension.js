// The client of `attndsl lsp`: it starts the server, and hands it the files that may hold programs.
"use strict";

const { window, workspace } = require("vscode");
const { LanguageClient, TransportKind } = require("vscode-languageclient/node");

const LANGUAGES = ["attn", "yaml", "toml", "json"];
let client;

async function activate() {
  const [command, ...args] = workspace.getConfiguration("attndsl").get("server.command");
  if (!command) {
    window.showErrorMessage("attndsl.server.command is empty: write [\"attndsl\", \"lsp\"]");
    return;
  }
  const documentSelector = LANGUAGES.flatMap((language) => [
    { scheme: "file", language },
    { scheme: "untitled", language },
  ]);
  const server = { command, args, transport: TransportKind.stdio };
  client = new LanguageClient("attndsl", "attndsl", server, {
    documentSelector,
    // Who opens a YAML file of other software is not to be told that attndsl is missing.
    initializationFailedHandler: () => false,
  });
  try {
    await client.start();
  } catch (error) {
    const programs = workspace.textDocuments.some((document) => document.languageId === "attn");
    if (programs) {
      window.showErrorMessage(
        `attndsl: '${command}' does not start (${error.message || error}). ` +
          "Run pip install 'attndsl[lsp]', or set attndsl.server.command."
      );
    }
  }
}

function deactivate() {
  return client ? client.stop() : undefined;
}

module.exports = { activate, deactivate };
