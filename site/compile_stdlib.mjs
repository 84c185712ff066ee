// Compiles Python's standard library once, at build time, so that no visitor's browser has to do it at every start.
//
//     node site/compile_stdlib.mjs FOLDER OUT.zip     FOLDER: the npm package pyodide, unpacked
//
// Pyodide does it itself, since bytecode is only good for the Python that made it. Docstrings and asserts are left out.

import fs from "node:fs";
import path from "node:path";
import { pathToFileURL } from "node:url";

const COMPILE = `
import zipfile
from importlib._bootstrap_external import _code_to_hash_pyc
from importlib.util import source_hash

with zipfile.ZipFile("in.zip") as source, zipfile.ZipFile("out.zip", "w", zipfile.ZIP_DEFLATED, compresslevel=9) as out:
    for name in source.namelist():
        data = source.read(name)
        if name.endswith(".py"):
            code = compile(data, name, "exec", dont_inherit=True, optimize=2)
            name, data = name + "c", bytes(_code_to_hash_pyc(code, source_hash(data), False))
        out.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
`;

const [folder, out] = process.argv.slice(2);
const { loadPyodide } = await import(pathToFileURL(path.resolve(folder, "pyodide.mjs")));
const python = await loadPyodide();
python.FS.writeFile("in.zip", new Uint8Array(fs.readFileSync(path.join(folder, "python_stdlib.zip"))));
python.runPython(COMPILE);
fs.writeFileSync(out, python.FS.readFile("out.zip"));
