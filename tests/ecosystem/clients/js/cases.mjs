// Runs named cases against the base URL that is the first argument; a second names the one to run.
export const PROMPT = "The mill stands by the river and";
export const MESSAGES = [{ role: "user", content: "What does a mill do?" }];

export async function run(cases) {
  const [baseUrl, named] = process.argv.slice(2);
  let failed = 0;
  for (const [name, test] of Object.entries(cases)) {
    if (named && name !== named) continue;
    try {
      await test(baseUrl);
      console.log(`passed ${name}`);
    } catch (error) {
      failed += 1;
      console.log(`FAILED ${name}\n${error.stack}`);
    }
  }
  process.exit(failed ? 1 : 0);
}
