# /// script
# dependencies = ["langgraph==1.2.22", "langchain-openai==1.7.3"]
# [tool.headwater]
# shows = ["tools", "cached", "error"]
# ///
"""LangGraph: an agent as a graph of a model and a tool, which calls the tool and reads its result."""

import json
import os
from pathlib import Path

import openai
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import StructuredTool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

task = json.loads(Path(os.environ["TASK"]).read_text())
server = {"base_url": os.environ["BASE_URL"] + "/v1", "api_key": "none", "model": os.environ["MODEL"], "max_retries": 0}
calls = []


def count_boats(town: str, number: int) -> str:
    """Count the boats."""
    calls.append({"name": "count_boats", "arguments": {"town": town, "number": number}})
    return task["result"]


def graph(temperature):
    """Return a graph of a model, which must call the tool until it has a result, and of the tool."""
    tool = StructuredTool.from_function(count_boats)
    model = ChatOpenAI(temperature=temperature, max_tokens=task["max_tokens"], **server)

    def ask(state):
        bound = model.bind_tools([tool], tool_choice="auto" if calls else "required")
        return {"messages": [bound.invoke([SystemMessage(task["system"]), *state["messages"]])]}

    built = StateGraph(MessagesState)
    built.add_node("model", ask)
    built.add_node("tools", ToolNode([tool]))
    built.add_edge(START, "model")
    built.add_conditional_edges("model", tools_condition)
    built.add_edge("tools", "model")
    return built.compile()


def run(temperature):
    return graph(temperature).invoke({"messages": [HumanMessage(task["order"])]}, {"recursion_limit": 10})


def refused():
    try:
        run(3)
    except openai.BadRequestError as error:
        return {"type": type(error).__name__, "message": str(error)}


answer = run(0)["messages"][-1].text
print(json.dumps({"tools": {"calls": calls, "answer": answer}, "error": refused()}))
