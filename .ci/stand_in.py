"""A server that speaks OpenAI's protocol, and refuses what such servers refuse. What it says is up to the test."""
import base64, http.server, io, json, math, threading

from PIL import Image

class StandIn(http.server.ThreadingHTTPServer):
    """answer(text, pictures) -> a text; a status, which refuses the question; or, with likelihoods, a list of pieces
    (token, {token: probability}). `asked` gets what it was asked, `change` is laid over each choice, `reply` over all."""
    def __init__(self, answer):
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer = answer
        self.asked, self.refused, self.change, self.reply, self.most = [], set(), {}, {}, 20
        self.address = f"http://127.0.0.1:{self.server_port}/v1"
        threading.Thread(target=self.serve_forever, args=[0.01], daemon=True).start()

def demand(condition, status, message):
    if not condition:
        raise ConnectionRefusedError(status, message)

def read_part(part):
    """-> a text or a picture; one that is none is refused."""
    if part["type"] == "text":
        return part["text"]
    head, _, data = part["image_url"]["url"].partition(",")
    demand(head == "data:image/png;base64", 400, "Invalid image URL")
    return Image.open(io.BytesIO(base64.b64decode(data, validate=True)))

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    log_message = lambda *args: None

    def do_POST(self):
        data = self.rfile.read(int(self.headers["Content-Length"]))
        try:
            status, reply = 200, self.complete(json.loads(data))
        except ConnectionRefusedError as refusal:
            status, message = refusal.args
            reply = {"error": {"message": message, "type": "invalid_request_error"}}
        body = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", len(body))
        self.end_headers()
        self.wfile.write(body)

    def complete(self, body):
        server = self.server
        demand(self.path == "/v1/chat/completions", 404, f"Not Found: {self.path}")
        known = {"model", "messages", "temperature", "logprobs", "top_logprobs"} - server.refused
        demand(body.keys() <= known, 400, f"Unrecognized request arguments: {body.keys() - known}")
        demand(body["model"] == "any", 404, f"The model {body['model']} does not exist")
        top = body.get("top_logprobs", 0)
        demand(0 <= top <= server.most and (body.get("logprobs") is True or not top), 400, "top_logprobs")
        message, = body["messages"]
        text, *pictures = [read_part(part) for part in message["content"]]
        server.asked.append((text, *pictures))
        answer = server.answer(text, pictures)
        demand(not isinstance(answer, int), answer, "Your input was flagged")
        has_chances = isinstance(answer, list)
        content = "".join([piece for piece, _ in answer]) if has_chances else answer
        choice = {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": "stop"}
        if body.get("logprobs") and has_chances:
            choice["logprobs"] = {"content": [describe(*piece, top) for piece in answer]}
        return {"id": "1", "object": "chat.completion", "choices": [choice | server.change]} | server.reply

def describe(token, others, top):
    """One of the protocol's logprobs.content."""
    def tell(text):
        chance = others.get(text, 1)
        return {"token": text, "logprob": math.log(chance) if chance else -9999.0, "bytes": [*text.encode()]}

    likeliest = sorted(others, key=others.get, reverse=True)[:top]
    return tell(token) | {"top_logprobs": [tell(text) for text in likeliest]}
