// On narrow screens fitkit.css stacks tables of sentences; each cell then needs the head of its column.
document.addEventListener("DOMContentLoaded", () => {
    for (const table of document.querySelectorAll("table.docutils")) {
        const heads = [...table.querySelectorAll("thead th")].map((head) => head.textContent.trim());
        const cells = [...table.querySelectorAll("tbody td")];
        const letters = cells.reduce((sum, cell) => sum + cell.textContent.length, 0);
        const figures = cells.filter((cell) => /\d/.test(cell.textContent)).length;
        // Tables of figures stay tables, because their columns are compared.
        if (heads.length < 3) continue;
        if (heads.length > 4 ? figures > cells.length / 3 : letters / cells.length < 18) continue;
        table.classList.add("stacked");
        for (const cell of cells) {
            cell.dataset.head = heads[cell.cellIndex];
            cell.classList.toggle("without-words", !cell.textContent.trim());
        }
    }
});
